// The data, and what is said of a run, as text.

const page = JSON.parse(document.getElementById("data").textContent);
const { ops, values, runs, stays, summary } = page;
const count = runs.op.length;
const at = (texts, i) => texts.texts[texts.index[i]];
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 40rem)");
const MOST_LIVE = 5;

// Text: the same formatter as the tables'.
// To even where a figure is just between two, as Python does.
const fixed = (value, digits) => {
  const tenfold = value * 10 ** digits;
  const below = Math.floor(tenfold);
  const isTie = tenfold - below === 0.5 && below % 2 === 0;
  return (isTie ? below / 10 ** digits : value).toFixed(digits);
};
const scaled = (bytes, largest) => {
  const units = [[2 ** 30, "GiB", 2], [2 ** 20, "MiB", largest >= 10 * 2 ** 20 ? 1 : 2]];
  for (const [unit, name, digits] of units) {
    if (Math.abs(largest) >= unit) return `${fixed(bytes / unit, digits)} ${name}`;
  }
  return `${fixed(bytes / 2 ** 10, 1)} KiB`;
};
const bytesText = (bytes) => scaled(bytes, bytes);
const percent = (fraction) => {
  const size = Math.abs(100 * fraction);
  return `${fixed(100 * fraction, 0 < size && size < 1 ? 2 : 1)} %`;
};
const escaped = (text) =>
  text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

// What is live while run i runs, largest first.
const liveAt = (i) => {
  const live = [];
  for (let k = 0; k < stays.value.length; k += 1) {
    if (stays.begin[k] <= i && i < stays.end[k]) live.push(stays.value[k]);
  }
  return live.sort((a, b) => values.size_bytes[b] - values.size_bytes[a]);
};
const lines = (i) => {
  const op = runs.op[i];
  const phase = runs.again[i] ? "computed again" : ops.backward[op] ? "backward" : "forward";
  const live = liveAt(i);
  const moduleOf = (v) => at(ops.module, values.producer[v]);
  const shown = live.slice(0, MOST_LIVE).map(
    (v) => `${values.name[v]} ${bytesText(values.size_bytes[v])} ${moduleOf(v)}`.trim());
  const rest = live.slice(MOST_LIVE).reduce((sum, v) => sum + values.size_bytes[v], 0);
  if (rest) shown.push(`${live.length - MOST_LIVE} more ${bytesText(rest)}`);
  return {
    title: `${ops.name[op]}, ${at(ops.target, op)}`,
    facts: [
      `${bytesText(runs.live_bytes[i])} live`,
      `run ${i + 1} of ${count}, ${phase}, ${(ops.cost_us[op] / 1000).toFixed(3)} ms`,
      [at(ops.module, op), at(ops.source, op)].filter(Boolean).join(", "),
    ].filter(Boolean),
    live: shown,
  };
};
const htmlOf = (i) => {
  const said = lines(i);
  const rows = [`<b>${escaped(said.title)}</b>`, ...said.facts.map(escaped),
    ...said.live.map((text) => `· ${escaped(text)}`)];
  return rows.join("<br>");
};
const textOf = (i) => {
  const said = lines(i);
  return `${said.title}: ${said.facts.join("; ")}. Largest live: ${said.live.join(", ")}.`;
};
