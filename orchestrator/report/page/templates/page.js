const find = (selector, within = document) => within.querySelector(selector);
const findAll = (selector, within = document) => [...within.querySelectorAll(selector)];
const PAGE_ROWS = 25;
// Columns of all cells on a phone, besides the measures: these first, if they vary.
const PHONE_AXES = 3;
const MOST_LETTERS = 16; // of a word that is never broken, as in the other tables
const PHONE_FIRST = ["name", "context_length", "precision"];
const OUT_OF_MEMORY = ["oom", "oom_inferred", "host_oom"];
const STATUS = { ok: "measured", oom: "out of memory", oom_inferred: "out of memory (inferred)", host_oom: "out of CPU memory", skipped: "impossible" };
const SLICE = "slice:"; // begins the part of the address that holds the filters of all cells

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// cell_data.py wrote the data: JSON, deflated, in base64.
async function unpack(id) {
  const bytes = Uint8Array.from(atob(find(`#${id}`).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

const once = (make) => {
  let made;
  return () => (made ??= make());
};
const readData = once(async () => JSON.parse(await unpack("data")));
const readDetails = once(async () => JSON.parse(await unpack("details")));
const readCells = once(async () => {
  const { n, columns, axes } = await readData();
  return Array.from({ length: n }, (_, row) => {
    const cell = { row, axes: {} };
    for (const [name, column] of Object.entries(columns)) cell[name] = valueAt(column, row);
    for (const [name, column] of Object.entries(axes)) cell.axes[name] = valueAt(column, row);
    return cell;
  });
});

function valueAt(column, row) {
  return column.w ? column.w[column.i[row]] ?? null : column.v[row];
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  let decimals = Math.max(digits - 1 - Math.floor(Math.log10(Math.abs(value))), 0);
  if (Math.abs(Number(value.toFixed(decimals))) >= 10 ** (digits - decimals)) decimals = Math.max(decimals - 1, 0);
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

const withUnit = (value, unit, digits) => (value === null || value === undefined ? "" : `${number(value, digits)}${unit}`);

// ---- theme
const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
find("#theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
});

// ---- heat map
const chosen = {};

async function showHeat() {
  const { heat } = await readData();
  const switches = findAll(".choice").map((group) => group.dataset.switch).filter((name) => name !== "measure");
  const options = switches.map((name) => chosen[name]);
  for (const link of findAll(".heat a")) {
    const views = heat[[link.dataset.at, ...options].join(",")] ?? {};
    const [text, label, key, shade, style] = views[chosen.measure] ?? Object.values(views)[0] ?? ["", "", "", 0, ""];
    link.textContent = text;
    link.className = style;
    link.style.setProperty("--v", shade);
    link.toggleAttribute("href", Boolean(key));
    link.toggleAttribute("aria-label", Boolean(key));
    if (!key) continue;
    link.href = `#cell=${key}`;
    link.setAttribute("aria-label", label);
  }
  const unit = find(`[data-switch=measure] [value=${chosen.measure}]`)?.dataset.unit;
  if (unit) find("#heat-unit").textContent = unit;
}

for (const group of findAll(".choice")) {
  chosen[group.dataset.switch] = find("[aria-pressed=true]", group).value;
  group.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    chosen[group.dataset.switch] = button.value;
    for (const other of findAll("button", group)) other.setAttribute("aria-pressed", String(other === button));
    showHeat();
  });
}
chosen.measure ??= "step";

// ---- tooltips show the labels that screen readers get
const tip = find("#tip");
addEventListener("pointerover", (event) => {
  const mark = event.target.closest?.(".panel [aria-label], .heat a[aria-label]");
  const isMark = mark && mark.tagName !== "svg" && mark.getAttribute("role") !== "group";
  tip.hidden = !isMark;
  if (isMark) tip.textContent = mark.getAttribute("aria-label");
});
addEventListener("pointermove", (event) => {
  tip.style.left = `${Math.max(Math.min(event.clientX + 12, innerWidth - 310), 4)}px`;
  tip.style.top = `${event.clientY + 14}px`;
});

// ---- copies of tables
const readCopies = once(async () => JSON.parse(await unpack("copies")));
addEventListener("click", (event) => {
  const button = event.target.closest(".more");
  if (button) button.closest(".tools").previousElementSibling.classList.toggle("whole");
});
addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const table = button.closest(".tools").previousElementSibling;
  const form = button.dataset.copy;
  await navigator.clipboard.writeText((await readCopies())[table.id.slice("table-".length)][form]);
  button.textContent = "copied";
  setTimeout(() => (button.textContent = form), 1200);
});

// ---- all cells
function valueOf(cell, name) {
  if (name === "what") return (cell.axes.pass ?? cell.task ?? "").replaceAll("_", " ");
  return name in cell.axes ? cell.axes[name] : cell[name]; // an axis may have the name of a measure
}

const showAllCells = once(async () => {
  const cells = await readCells();
  const { columns, axes, shown: shownAxes, more } = await readData();
  const source = new Blob([await unpack("library")], { type: "text/javascript" });
  await import(URL.createObjectURL(source));
  const rank = (name, value) => (axes[name] ?? columns[name])?.w?.indexOf(value) ?? value;
  const column = (title, name, className, show = plain) => ({
    title,
    className,
    createdCell: (td) => td.classList.toggle("long", td.textContent.split(/\s/).some((word) => word.length > MOST_LETTERS)),
    data: (cell, type) => {
      const value = valueOf(cell, name) ?? null;
      if (type === "sort" || type === "type") return value === null ? Infinity : (axes[name] ?? columns[name])?.w ? rank(name, value) : value;
      if (type !== "display") return ""; // DataTables would parse a text for its search as HTML
      const content = show(value, cell);
      return content instanceof Node ? content : document.createTextNode(content); // and a text to show
    },
  });
  const rankOnPhone = (name) => [...PHONE_FIRST, name].indexOf(name);
  const narrow = shownAxes.map(([name]) => name).sort((a, b) => rankOnPhone(a) - rankOnPhone(b)).slice(0, PHONE_AXES);
  const isNarrow = (index) => narrow.includes(shownAxes[index][0]);
  const settings = (cell, names) => names.map(([name, title, usual]) => [title, valueOf(cell, name), usual]).filter(([, value, usual]) => ![null, undefined, "", usual].includes(value));
  const nameOf = (cell) => {
    const hidden = settings(cell, shownAxes.filter((_, index) => !isNarrow(index)));
    const content = element("span");
    content.append(linkTo(cell, cell.name), element("small", hidden.map(([title, value]) => (isFinite(value) ? `${title} ${plain(value)}` : value)).join(" · "), "phone"));
    return content;
  };
  const shown = shownAxes.map(([name, title], index) => {
    const style = isNarrow(index) ? "" : " wide";
    if (name === "name") return column(title, name, "text", (value, cell) => nameOf(cell));
    if (name === "context_length") return column(title, name, style, (value) => value?.toLocaleString("en") ?? "–");
    return column(title, name, `text${style}${name === "what" ? " whole-words" : ""}`);
  });
  if (more.length) shown.push({ title: "other settings", className: "text wide", orderable: false, data: (cell, type) => (type === "display" ? element("small", settings(cell, more).map(([title, value]) => `${title} ${plain(value)}`).join(", ")) : "") });
  shown.push(column(columns.step ? "ms" : "status", "step", "", (value, cell) => timeOf(cell)));
  for (const [title, name] of [["peak GiB", "peak"], ["RSS GiB", "resident"]]) if (columns[name]) shown.push(column(title, name, "", (value) => number(value)));
  const haystacks = cells.map((cell) => Object.values({ ...cell, ...cell.axes, title: "", axes: "" }).map((value) => String(value).toLowerCase()));
  const filters = find("#filters").dataset.filters.split(" ");
  const selects = Object.fromEntries(filters.map((name) => [name, addFilter(name, Object.fromEntries(shownAxes)[name] ?? name, cells, rank)]));
  const words = find("#words");
  const table = new window.DataTable("#all", {
    data: cells,
    columns: shown,
    pageLength: PAGE_ROWS,
    lengthChange: false,
    order: shownAxes.map((_, index) => [index, "asc"]).filter(([index]) => !["run", "what"].includes(shownAxes[index][0])),
    pagingType: "simple_numbers",
    layout: { topStart: "info", topEnd: "paging", bottomStart: null, bottomEnd: null },
    deferRender: true,
    autoWidth: false,
    language: { info: cells.length > 1 ? "_START_–_END_ of _TOTAL_ cells" : "", infoFiltered: "(of _MAX_)", infoEmpty: "0 cells", zeroRecords: "No cell matches. Remove a filter." },
  });
  window.DataTable.ext.search.push((settings, texts, index, cell) => {
    const passes = filters.every((name) => !selects[name].value || String(valueOf(cell, name)) === selects[name].value);
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    return passes && wanted.every((word) => haystacks[cell.row].some((text) => text === word || (word.length > 3 && text.includes(word))));
  });
  readSlice(selects, words);
  find("#filters").addEventListener("input", () => {
    writeSlice(selects, words);
    table.draw();
  });
  table.draw();
});

function plain(value) {
  return String(value ?? "–").replace(/^(-?\d+)\.0$/, "$1");
}

function addFilter(name, title, cells, rank) {
  const label = element("label", title);
  const select = document.createElement("select");
  select.append(new Option("any", ""));
  const values = [...new Set(cells.map((cell) => valueOf(cell, name)).filter((value) => value !== null && value !== undefined))];
  values.sort((a, b) => rank(name, a) - rank(name, b));
  for (const value of values) select.append(new Option(STATUS[value] ?? plain(value), value));
  label.append(select);
  label.hidden = values.length < 2;
  find("#filters").insertBefore(label, find("#filters").lastElementChild);
  return select;
}

function linkTo(cell, text) {
  const link = element("a", text ?? cell.key);
  link.href = `#cell=${cell.key}`;
  return link;
}

function timeOf(cell) {
  if (cell.status !== "ok") return statusBadge(cell);
  if (cell.step === undefined) return statusBadge(cell);
  const text = element("span", number(cell.step));
  if (cell.cpu === 1 && cell.step !== null) text.append("†");
  return text;
}

function statusBadge(cell) {
  return element("span", STATUS[cell.status] ?? cell.status, `status${cell.status === "ok" || cell.status === "skipped" ? "" : " bad"}`);
}

function readSlice(selects, words) {
  if (!location.hash.startsWith(`#${SLICE}`)) return;
  const state = new URLSearchParams(location.hash.slice(1 + SLICE.length));
  for (const [name, select] of Object.entries(selects)) select.value = state.get(name) ?? "";
  words.value = state.get("words") ?? "";
  find("#cells").scrollIntoView();
}

function writeSlice(selects, words) {
  const state = new URLSearchParams();
  for (const [name, select] of Object.entries(selects)) if (select.value) state.set(name, select.value);
  if (words.value) state.set("words", words.value);
  history.replaceState(null, "", `#${String(state) ? SLICE + state : "cells"}`);
}

// ---- drawer of a cell
const dialog = find("#cell");
let addressBefore = "";

async function openCell() {
  const wanted = location.hash.startsWith("#cell=") ? decodeURIComponent(location.hash.slice("#cell=".length)) : null;
  const cell = wanted && (await readCells()).find((one) => one.key === wanted || one.key.startsWith(wanted));
  if (!cell) {
    if (dialog.open) dialog.close();
    return;
  }
  const { run, columns, roles } = await readData();
  find("#cell-content").replaceChildren(...describe(cell, run, columns.run.w.length > 1));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  const details = (await readDetails())[cell.row];
  if (location.hash === `#cell=${wanted}` || decodeURIComponent(location.hash) === `#cell=${wanted}`) find("#cell-content").append(...describeDetails(cell, details, roles));
}

function describe(cell, run, isCollection) {
  const title = element("h2", cell.title);
  title.id = "cell-title";
  const line = element("p", "", "sub");
  line.append(statusBadge(cell), ` · run ${cell.run} · cell `, element("code", cell.key.split(":").at(-1)));
  const parts = [title, line];
  if (OUT_OF_MEMORY.includes(cell.status)) parts.push(element("p", whereMemoryEnded(cell), "bad"));
  else if (cell.reason) parts.push(element("p", cell.reason));
  const limits = { 1: "the CPU: another machine gives another time", 0: "the GPU" };
  parts.push(
    ...section("Time", {
      "Step, median": (cell.step ?? null) === null ? "" : `${number(cell.step, 4)} ms [${number(cell.low, 4)} to ${number(cell.high, 4)}], n = ${cell.n}`,
      "Mean and deviation": cell.mean === null || cell.mean === undefined ? "" : `${number(cell.mean, 4)} ± ${number(cell.sd)} ms`,
      Forward: withUnit(cell.forward, " ms"),
      Backward: withUnit(cell.backward, " ms"),
      Optimizer: withUnit(cell.optimizer, " ms"),
      "GPU kernels": cell.kernels ? `${number(cell.kernels)} ms (${Math.round((100 * cell.kernels) / cell.step)}% of the step)` : "",
      "Limited by": limits[cell.cpu] ?? "",
      "Tokens per second": cell.tokens ? Math.round(cell.tokens).toLocaleString("en") : "",
      MFU: cell.mfu ? `${cell.mfu.toFixed(1)}%` : "",
    }),
    ...section("Memory", {
      Peak: withUnit(cell.peak, " GiB", 4),
      "Resident, whole process": withUnit(cell.resident, " GiB"),
      Reserved: withUnit(cell.reserved, " GiB", 4),
      Predicted: withUnit(cell.predicted, " GiB", 4),
    }),
    ...section("Set-up", { ...cell.axes, gpu: cell.gpu, torch: cell.torch, host: cell.host, commit: cell.commit, measured: cell.started }),
    element("h3", "More"),
    preformatted(`sweep show ${run} ${isCollection ? `${cell.run}:` : ""}${cell.key.split(":").at(-1).slice(0, 6)}`),
  );
  return parts;
}

function whereMemoryEnded(cell) {
  const asked = cell.asked ? `: asked for ${number(cell.asked)} GiB` : "";
  const held = cell.asked && cell.allocated ? ` with ${number(cell.allocated)} GiB allocated` : "";
  const limit = cell.axes.memory_limit_gib ? `, limit ${cell.axes.memory_limit_gib} GiB` : "";
  return `Ran out in ${cell.phase || cell.stage || "this cell"}${asked}${held}${limit}.`;
}

function section(title, values) {
  const known = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  if (!known.length) return [];
  const list = document.createElement("dl");
  for (const [name, value] of known) list.append(element("dt", name.replaceAll("_", " ")), element("dd", String(value)));
  const heading = element("h3", title);
  if (title === "Set-up") heading.id = "set-up";
  return [heading, list];
}

function describeDetails(cell, { attempts, samples, live, log }, roles) {
  const parts = [];
  if (live) find("#set-up").before(element("h3", "Live memory during a step"), timeline(live, roles));
  if (samples?.length > 1) parts.push(element("h3", `The ${samples.length} measured steps, ms`), strip(samples, cell));
  for (const attempt of attempts) {
    const hasEvidence = Object.keys(attempt.evidence).length > 0;
    if (attempts.length < 2 && !hasEvidence) continue;
    const where = attempt.where === "–" ? "" : ` in ${attempt.where}`;
    parts.push(...section(`Attempt ${attempt.number}: ${STATUS[attempt.status] ?? attempt.status}${where}, ${attempt.wall_s} s`, hasEvidence ? attempt.evidence : { evidence: "none" }));
  }
  if (log) parts.push(element("h3", "End of the log"), preformatted(log));
  return parts;
}

function preformatted(text) {
  const block = document.createElement("pre");
  block.tabIndex = 0;
  block.append(element("code", text));
  return block;
}

function shape(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  return made;
}

function strip(samples, cell) {
  const known = samples.filter((value) => value !== null);
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const x = (index) => 4 + (492 * index) / (samples.length - 1);
  const y = (value) => (most > least ? 58 - (52 * (Math.min(Math.max(value, least), most) - least)) / (most - least) : 32);
  const drawing = shape("svg", { viewBox: "0 0 500 64", class: "strip", role: "img", preserveAspectRatio: "none", "aria-label": `${known.length} steps from ${number(least, 4)} to ${number(most, 4)} ms` });
  if (cell.low) drawing.append(shape("rect", { x: 0, width: 500, y: y(cell.high), height: Math.max(y(cell.low) - y(cell.high), 1) }));
  samples.forEach((value, index) => {
    if (value !== null) drawing.append(shape("circle", { cx: x(index), cy: y(value), r: 3 }));
  });
  const figure = document.createElement("div");
  figure.append(drawing, element("p", `${number(least, 4)} to ${number(most, 4)}, in order; the band is the interval of the median`, "key"));
  return figure;
}

// ---- live memory of a cell, which a reader can zoom
function timeline({ at, phases, roles: curves }, colours) {
  const [left, right, top, bottom, height] = [44, 6, 14, 22, 240];
  const width = innerWidth < 560 ? 340 : 520; // so that letters are not scaled
  const names = Object.keys(colours).filter((role) => curves[role]);
  const totals = at.map((_, index) => names.reduce((sum, role) => sum + curves[role][index], 0));
  const [begin, end] = [at[0], at.at(-1) > at[0] ? at.at(-1) : at[0] + 1];
  let [from, to] = [begin, end];
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Live memory by role over ${number(end - begin)} ms` });
  const x = (ms) => left + ((width - left - right) * (ms - from)) / (to - from);
  const timeAt = (event) => {
    const box = drawing.getBoundingClientRect();
    const share = ((event.clientX - box.left) * (width / box.width) - left) / (width - left - right);
    return from + (to - from) * Math.min(Math.max(share, 0), 1);
  };
  const indexAt = (ms) => Math.max(at.findLastIndex((one) => one <= ms), 0);
  const words = element("p", "", "key");
  const pointer = shape("line", { class: "at", y1: top, y2: height - bottom, visibility: "hidden" });
  const window_ = shape("rect", { class: "window", y: top, height: height - top - bottom, width: 0 });

  function say(index) {
    const phase = phases.findLast(([, ms]) => ms <= at[index])?.[0] ?? "";
    words.replaceChildren(element("span", `${number(at[index])} ms${phase ? `, ${phase}` : ""}: ${number(totals[index] / 1024)} GiB`));
    for (const role of names) {
      const entry = element("span");
      const box = element("i", "", "box");
      box.style.color = `var(--${colours[role]})`;
      entry.append(box, `${role} ${number(curves[role][index] / 1024)}`);
      words.append(entry);
    }
  }

  function draw() {
    const [first, last] = [indexAt(from), indexAt(to)];
    const most = Math.max(...totals.slice(first, last + 1), 1) * 1.05;
    const y = (value) => height - bottom - ((height - top - bottom) * value) / most;
    const parts = [];
    let below = at.map(() => 0);
    for (const role of names) {
      const above = below.map((value, index) => value + curves[role][index]);
      const edge = (levels) => {
        const points = [[left, levels[first]]];
        for (let index = first + 1; index <= last; index++) points.push([x(at[index]), levels[index - 1]], [x(at[index]), levels[index]]);
        return [...points, [width - right, levels[last]]].map(([across, level]) => `${across.toFixed(1)},${y(level).toFixed(1)}`);
      };
      parts.push(shape("polygon", { points: [...edge(above), ...edge(below).reverse()].join(" "), fill: `var(--${colours[role]})` }));
      below = above;
    }
    for (const [name, ms] of phases) {
      if (ms < from || ms > to) continue;
      parts.push(shape("line", { class: "phase", x1: x(ms), x2: x(ms), y1: top, y2: height - bottom }), label(x(ms) + 2, top - 3, name, "start"));
    }
    parts.push(shape("line", { class: "grid", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    for (const share of [0, 0.5, 1]) {
      parts.push(label(left - 4, y((share * most) / 1.05) + 4, number((share * most) / 1.05 / 1024), "end"));
      parts.push(label(left + (width - left - right) * share, height - 8, `${number(from + (to - from) * share, 4)}${share ? "" : " ms"}`, ["start", "middle", "end"][share * 2]));
    }
    drawing.replaceChildren(...parts, label(4, top - 3, "GiB", "start"), window_, pointer);
    window_.setAttribute("width", 0);
    say(totals.indexOf(Math.max(...totals.slice(first, last + 1)), first));
  }

  function zoom(a, b) {
    const least = (end - begin) / 1000;
    [from, to] = [Math.max(Math.min(a, b), begin), Math.min(Math.max(a, b), end)];
    if (to - from < least) [from, to] = [Math.max(from - least, begin), Math.min(to + least, end)];
    draw();
  }

  let pressed = null;
  drawing.addEventListener("pointerdown", (event) => {
    pressed = timeAt(event);
    drawing.setPointerCapture(event.pointerId);
  });
  drawing.addEventListener("pointermove", (event) => {
    const ms = timeAt(event);
    for (const end_ of ["x1", "x2"]) pointer.setAttribute(end_, x(ms));
    pointer.setAttribute("visibility", "visible");
    say(indexAt(ms));
    if (pressed === null) return;
    window_.setAttribute("x", x(Math.min(ms, pressed)));
    window_.setAttribute("width", Math.abs(x(ms) - x(pressed)));
  });
  drawing.addEventListener("pointerup", (event) => {
    const ms = timeAt(event);
    if (pressed !== null && Math.abs(x(ms) - x(pressed)) > 4) zoom(pressed, ms);
    pressed = null;
  });
  drawing.addEventListener("pointercancel", () => (pressed = null));
  const by = (share, shift) => () => {
    const [middle, half] = [(from + to) / 2 + shift * (to - from), ((to - from) * share) / 2];
    const centre = Math.min(Math.max(middle, begin + half), end - half);
    zoom(centre - half, centre + half);
  };
  const controls = element("div", "", "controls");
  for (const [text, name, act] of [["+", "Zoom in", by(0.5, 0)], ["−", "Zoom out", by(2, 0)], ["←", "Earlier", by(1, -0.5)], ["→", "Later", by(1, 0.5)], ["all", "Whole step", () => zoom(begin, end)]]) {
    const button = element("button", text);
    button.type = "button";
    button.setAttribute("aria-label", name);
    button.addEventListener("click", act);
    controls.append(button);
  }
  controls.append(element("span", "or drag over the part to zoom into"));
  draw();
  const figure = element("div", "", "timeline");
  figure.append(drawing, words, controls);
  return figure;
}

function label(x, y, text, anchor) {
  const made = shape("text", { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}

addEventListener("hashchange", (event) => {
  if (!new URL(event.oldURL).hash.startsWith("#cell=")) addressBefore = new URL(event.oldURL).hash;
  openCell();
});
dialog.addEventListener("close", () => {
  if (location.hash.startsWith("#cell=")) history.replaceState(null, "", addressBefore || location.pathname + location.search);
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close();
});
find("#close").addEventListener("click", () => dialog.close());
if (location.hash.startsWith("#cell=")) openCell();
if (find("#cells")) {
  const isNear = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    isNear.disconnect();
    showAllCells();
  }, { rootMargin: "200px" });
  isNear.observe(find("#cells"));
  if (location.hash.startsWith(`#${SLICE}`)) showAllCells();
}
