// What packing.py packed, as it was.

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const VALUES = new Map([...LETTERS].map((letter, place) => [letter, place]));

function unpacked(text) {
  const numbers = [];
  let [last, signed, scale] = [0, 0, 1];
  for (const letter of text) {
    const value = VALUES.get(letter);
    signed += (value % 32) * scale; // no shifts: those are of 32 bits
    scale *= 32;
    if (value >= 32) continue;
    last += signed % 2 ? -(signed - 1) / 2 : signed / 2;
    numbers.push(last);
    [signed, scale] = [0, 1];
  }
  return numbers;
}

function rowsOf([count, columns]) {
  const unpackedColumns = columns.map(([values, places]) => [values, unpacked(places)]);
  return Array.from({ length: count }, (_, row) => unpackedColumns.map(([values, places]) => values[places[row] ?? 0]));
}

function chartOf(spec) {
  const recordsOf = ([fields, rows]) => rowsOf(rows).map((row) => Object.fromEntries(row.map((value, place) => [fields[place], value])));
  const datasets = Object.entries(spec.datasets).map(([name, packed]) => [name, recordsOf(packed)]);
  return { ...spec, datasets: Object.fromEntries(datasets) };
}

function cellOf(cell, [task, status, parameters, attempts, samples, log, byHand], texts) {
  const pairs = parameters.map((place) => texts[place]);
  return {
    cell,
    task: texts[task],
    status: texts[status],
    parameters: Object.fromEntries(pairs.flatMap((name, place) => (place % 2 ? [] : [[name, pairs[place + 1]]]))),
    attempts: attempts.map((attempt) => attemptOf(attempt, texts)),
    samples: samplesOf(samples),
    log,
    by_hand: byHand,
  };
}

function attemptOf([number, status, where, started, wall_s, evidence], texts) {
  const said = evidence.map(([name, ...lines]) => [texts[name], lines.map((place) => texts[place]).join("\n")]);
  return { number, status: texts[status], where: texts[where], started, wall_s, evidence: Object.fromEntries(said) };
}

function samplesOf([places, counts, decimals, values, others]) {
  const [numbers, ofEach, tens] = [values, counts, decimals].map(unpacked);
  let end = 0;
  const series = unpacked(places).map((place, one) => {
    const scale = Number(`1e${tens[one]}`);
    end += ofEach[one];
    return [place, numbers.slice(end - ofEach[one], end).map((number) => number / scale)];
  });
  return [...series, ...others].sort(([first], [second]) => first - second);
}
