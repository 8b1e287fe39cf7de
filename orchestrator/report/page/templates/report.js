// Texts that stand for a missing value: a column of numbers may have them.
const NO_NUMBER = /^(–|never|OOM.*|host OOM|time-out|ok|oom|host_oom|timeout|crashed|failed|skipped|lost)$/;
const NUMBER = /^[≈±+−-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?(?![A-Za-z\d.])/;
const BAD = /^(OOM|host OOM|time-out|oom|host_oom|timeout|crashed|failed|lost)\b/;
const ROWS_AT_ONCE = Number(document.getElementById("report").dataset.rowsAtOnce);
const SERIES = await unpack(document.getElementById("series")); // name and unit of each series of samples
const LONG = 60; // characters of a text that may wrap

// packing.py wrote the data: JSON, compressed with gzip, in base64.
async function unpack(script) {
  const bytes = Uint8Array.from(atob(script.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

function numberIn(text) {
  const found = NUMBER.exec(text);
  return found ? Number(found[0].replace(/[≈±,]/g, "").replace("−", "-")) : null;
}

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

class SortableTable {
  static async load(section) {
    const hidden = section.querySelector("script.rows");
    return new SortableTable(section, hidden ? await unpack(hidden) : []);
  }

  constructor(section, hiddenRows) {
    this.section = section;
    this.body = section.querySelector("tbody");
    this.heads = [...section.querySelectorAll("th")];
    this.titles = this.heads.map((head) => head.textContent);
    const shown = [...this.body.rows].map((row) => [...row.cells].map((cell) => cell.textContent));
    this.rows = [...shown, ...hiddenRows];
    this.haystacks = this.rows.map((row) => row.join(" ").toLowerCase());
    this.numeric = this.titles.map((_, column) => this.isNumeric(column));
    this.isHeatMap = section.querySelector("table.heat") !== null;
    this.largest = this.rows.flat().reduce((most, text) => Math.max(most, gibibytes(text)), 0);
    this.sorted = { column: -1, order: "none" };
    this.limit = ROWS_AT_ONCE;
    this.heads.forEach((head, column) => {
      head.classList.toggle("number", this.numeric[column]);
      head.firstElementChild.addEventListener("click", () => this.sortBy(column));
    });
    section.querySelector(".filter").addEventListener("input", () => this.refresh());
    this.more = section.querySelector(".more");
    this.more.addEventListener("click", () => {
      this.limit += ROWS_AT_ONCE * 5;
      this.refresh();
    });
  }

  isNumeric(column) {
    const texts = this.rows.map((row) => row[column]).filter((text) => !NO_NUMBER.test(text));
    return texts.length > 0 && texts.every((text) => numberIn(text) !== null);
  }

  sortBy(column) {
    const next = { none: "ascending", ascending: "descending", descending: "none" };
    const order = this.sorted.column === column ? next[this.sorted.order] : "ascending";
    this.sorted = { column, order };
    this.heads.forEach((head, index) => head.setAttribute("aria-sort", index === column ? order : "none"));
    this.refresh();
  }

  compare(first, second) {
    const { column, order } = this.sorted;
    const [a, b] = [this.rows[first][column], this.rows[second][column]];
    const direction = order === "ascending" ? 1 : -1;
    if (!this.numeric[column]) return direction * a.localeCompare(b, "en", { numeric: true });
    const [x, y] = [numberIn(a), numberIn(b)];
    if (x === null || y === null) return x === y ? a.localeCompare(b) : x === null ? 1 : -1;
    return direction * (x - y);
  }

  refresh() {
    const everywhere = document.getElementById("filter-all").value;
    const words = `${everywhere} ${this.section.querySelector(".filter").value}`.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = [...this.rows.keys()].filter((row) => words.every((word) => this.haystacks[row].includes(word)));
    if (this.sorted.order !== "none") chosen.sort((a, b) => this.compare(a, b));
    this.body.replaceChildren(...chosen.slice(0, this.limit).map((row) => this.makeRow(this.rows[row])));
    this.more.hidden = chosen.length <= this.limit;
    const [found, all] = [chosen.length, this.rows.length].map((count) => count.toLocaleString("en"));
    const count = found === all ? `${all} rows` : `${found} of ${all} rows`;
    this.section.querySelector(".count").textContent = this.more.hidden ? count : `${count}, the first ${this.limit} shown`;
  }

  makeRow(texts) {
    const row = document.createElement("tr");
    row.append(...texts.map((text, column) => this.makeCell(text, column)));
    return row;
  }

  makeCell(text, column) {
    const cell = element("td");
    if (this.numeric[column]) cell.classList.add("number");
    if (BAD.test(text)) cell.classList.add("bad");
    if (text.length > LONG) cell.classList.add("long");
    if (this.isHeatMap && gibibytes(text)) {
      cell.classList.add("heat");
      cell.style.setProperty("--heat", `${warmth(gibibytes(text), this.largest)}%`);
    }
    if (this.titles[column] === "cell") {
      const link = element("a", text);
      link.href = `#cell-${encodeURIComponent(text)}`;
      cell.append(link);
    } else {
      cell.textContent = text;
    }
    return cell;
  }
}

function gibibytes(text) {
  return /^\d+(\.\d+)? GiB/.test(text) ? numberIn(text) : 0;
}

function warmth(gib, largest) {
  return Math.round(6 + 44 * Math.max(0, 1 + Math.log2(gib / largest) / 6));
}

async function openCell() {
  const dialog = document.getElementById("cell");
  const wanted = location.hash.startsWith("#cell-") ? decodeURIComponent(location.hash.slice("#cell-".length)) : null;
  const data = wanted && document.querySelector(`script[data-cell="${CSS.escape(wanted)}"]`);
  if (!data) {
    if (dialog.open) dialog.close();
    return;
  }
  const hash = location.hash;
  const cell = await unpack(data);
  if (location.hash !== hash) return; // another cell was opened during the decompression
  document.getElementById("cell-content").replaceChildren(...describe(cell));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

function describe(cell) {
  const title = element("h2", `Cell ${cell.cell} of ${cell.task} `);
  title.id = "cell-title";
  title.append(badge(cell.status));
  const parts = [title, element("h3", "Parameters"), definitions(cell.parameters), element("h3", "Attempts")];
  for (const attempt of cell.attempts) {
    const line = element("p", `${attempt.number}: `);
    const where = attempt.where === "–" ? "" : ` in ${attempt.where}`;
    line.append(badge(attempt.status), `${where}, ${attempt.wall_s} s, began ${attempt.started} UTC`);
    parts.push(line, definitions(attempt.evidence));
  }
  if (cell.samples.length) parts.push(element("h3", "Samples"), samplesTable(cell.samples.map(named)));
  if (cell.log) parts.push(element("h3", "End of the log"), element("pre", cell.log));
  if (cell.by_hand) parts.push(element("h3", "Run it again"), element("pre", cell.by_hand));
  return parts;
}

function badge(status) {
  return element("span", status, `badge ${status === "ok" ? "good" : status === "skipped" ? "quiet" : "bad"}`);
}

function definitions(values) {
  const list = document.createElement("dl");
  for (const [name, value] of Object.entries(values)) {
    list.append(element("dt", name), element("dd", value, value.includes("\n") ? "code" : ""));
  }
  return list;
}

function named([index, values]) {
  const [name, unit] = SERIES[index];
  return { name, unit, values };
}

function samplesTable(samples) {
  const table = element("table", "", "samples");
  const head = table.createTHead().insertRow();
  for (const title of ["series", "values in order", "unit", ""]) head.append(element("th", title));
  const body = table.createTBody();
  for (const { name, unit, values } of samples) {
    const row = body.insertRow();
    const texts = values.map((value) => value ?? "null").join(", ");
    row.append(element("td", name), element("td", texts, "values"), element("td", unit));
    const last = element("td");
    if (values.length > 1) last.append(strip(values));
    row.append(last);
  }
  return table;
}

function strip(values) {
  const known = values.filter((value) => value !== null);
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  drawing.setAttribute("viewBox", "0 0 120 24");
  drawing.setAttribute("class", "strip");
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", `from ${least} to ${most}`);
  values.forEach((value, index) => {
    if (value === null) return;
    const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    dot.setAttribute("cx", 3 + (114 * index) / (values.length - 1));
    dot.setAttribute("cy", most > least ? 21 - (18 * (value - least)) / (most - least) : 12);
    dot.setAttribute("r", 2);
    drawing.append(dot);
  });
  return drawing;
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const [text, quiet, line] = ["--text", "--quiet", "--line"].map((name) => style.getPropertyValue(name).trim());
  const words = { labelColor: text, titleColor: text };
  return {
    background: "transparent",
    font: "system-ui, sans-serif",
    view: { stroke: line },
    axis: { ...words, gridColor: line, domainColor: quiet, tickColor: quiet },
    legend: words,
    header: words,
    title: { color: text },
    rule: { color: text },
  };
}

async function drawCharts() {
  for (const holder of document.querySelectorAll(".chart")) {
    const spec = await unpack(holder.nextElementSibling);
    const config = { ...spec.config, ...colours() };
    const options = { actions: false, ast: true, renderer: "svg", tooltip: { theme: isDark() ? "dark" : "light" } };
    window.vegaEmbed(holder, { ...spec, config }, options).catch((error) => {
      holder.textContent = `This chart could not be drawn: ${error.message}`;
    });
  }
}

function showTheme() {
  document.getElementById("theme").setAttribute("aria-pressed", String(isDark()));
  drawCharts();
}

const tables = await Promise.all([...document.querySelectorAll("section.table")].map(SortableTable.load));
tables.forEach((table) => table.refresh());
document.getElementById("filter-all").addEventListener("input", () => tables.forEach((table) => table.refresh()));

const dialog = document.getElementById("cell");
document.getElementById("close").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => {
  if (location.hash.startsWith("#cell-")) history.replaceState(null, "", location.pathname);
});
addEventListener("hashchange", openCell);
openCell();

document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
showTheme();
