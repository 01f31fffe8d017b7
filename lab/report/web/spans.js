// What the data block holds, unpacked: panels (a run each) with their spans by row, and where samples moved.
// Ids are data: they reach the page as textContent and canvas text only.
const data = JSON.parse(document.getElementById("spans").textContent);
const tick_s = data.horizon_s / data.ticks || 1;
const most_rows = Math.max(1, ...data.runs.map((run) => run.replicas.length));
const late = new Uint32Array(data.samples.length); // of samples that ended in a tail: which of them, from 1 on
data.last.forEach((sample, place) => { late[sample] = place + 1; });

const unpack = (text, Kind) => new Kind(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const role_named = (name) => data.roles.indexOf(name);
const LOST = role_named("lost"), WON = role_named("won"), RACE = role_named("race"), PREFILL = role_named("prefill");

const panels = data.runs.map((run, index) => {
  const base = document.getElementById("run" + index);
  const panel = { run, base, over: base.nextElementSibling, offsets: run.offsets, cursor: -1, note: null };
  for (const [name, Kind] of [["sample", Uint32Array], ["role", Uint8Array], ["begin", Uint16Array],
    ["end", Uint16Array], ["tokens", Uint32Array], ["lane", Uint16Array]]) panel[name] = unpack(run[name], Kind);
  if (run.note) panel.note = unpack(run.note, Uint32Array);
  if (run.bands) {
    panel.bands = { offsets: run.bands.offsets, role: unpack(run.bands.role, Uint8Array),
      begin: unpack(run.bands.begin, Uint16Array), end: unpack(run.bands.end, Uint16Array) };
  }
  panel.lanes = panel.lane.reduce((most, lane) => Math.max(most, lane + 1), 1);
  panel.moves = []; // pairs of spans of one sample on two rows: the later went on from, or copies, the earlier
  unpack(run.source, Uint32Array).forEach((source, i) => { if (source) panel.moves.push([source - 1, i]); });
  return panel;
});
const lanes = Math.max(...panels.map((panel) => panel.lanes));

function row_of(panel, i) {
  let low = 0, high = panel.offsets.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (panel.offsets[mid] <= i) low = mid; else high = mid; }
  return low;
}
