// What the page says of spans, and what pointing, keys and the controls above the panels do.
const find = document.getElementById("find"), told = document.getElementById("told");
const tip = document.getElementById("tip"), colour = document.getElementById("colour");
const seconds = (ticks) => Number((ticks * tick_s).toPrecision(5)).toLocaleString("en", { maximumFractionDigits: 6 }) + " s";

const all = (step) => panels.forEach(step);

// ---- words ----
const place = (panel, i) => `replica ${panel.run.replicas[row_of(panel, i)]}, ${data.roles[panel.role[i]]}, ` +
  `${seconds(panel.begin[i])} to ${seconds(panel.end[i])} (${seconds(panel.end[i] - panel.begin[i])}), ` +
  `${panel.tokens[i].toLocaleString("en")} tokens` + (panel.note ? "\n" + data.notes[panel.note[i]] : "");

const MAKES = ["generate", "race", "won"]; // others make none, or none that count
function journey(panel) {
  const path = path_of(panel), stays = [];
  if (!path.length) return "not shown";
  let tokens = 0;
  for (const i of path) {
    const replica = panel.run.replicas[row_of(panel, i)];
    if (panel.role[i] !== LOST && stays[stays.length - 1] !== replica) stays.push(replica);
    if (MAKES.includes(data.roles[panel.role[i]])) tokens += panel.tokens[i];
  }
  const where = stays.slice(0, 12).join(" → ") + (stays.length > 12 ? " → …" : "");
  const until = Math.max(...path.map((i) => panel.end[i]));
  return `${seconds(panel.begin[path[0]])} to ${seconds(until)}, ${path.length} span${path.length > 1 ? "s" : ""}, ` +
    `${tokens.toLocaleString("en")} tokens, replica ${where}`;
}

function tell() {
  const lines = [marked < 0 ? "No sample is marked." : "Marked: " + data.samples[marked]];
  if (marked >= 0) all((panel) => lines.push(panel.run.system + ": " + journey(panel)));
  told.textContent = lines.join("\n");
}

function mark(sample) {
  marked = sample;
  all(draw_marked);
  tell();
}

function show_tip(panel, i, x, y) {
  tip.hidden = i < 0;
  if (i < 0) return;
  tip.textContent = data.samples[panel.sample[i]] + "\n" + place(panel, i);
  tip.style.left = Math.min(x + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(y + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
}

// ---- pointing ----
const time_at = (panel, x) => view.t0 + (x - LEFT) / (panel.width - LEFT - RIGHT) * (view.t1 - view.t0);
const rows_at = (y) => view.r0 + (y - TOP) / row_height();

function span_at(panel, x, y) {
  const t = time_at(panel, x), row = Math.floor(rows_at(y)), lane = (y - y_of(row)) / lane_height();
  if (x < LEFT || y < TOP || !(row >= 0 && row < panel.run.replicas.length)) return -1;
  let best = -1, distance = Math.max(1, 3 / lane_height());
  for (let i = panel.offsets[row]; i < panel.offsets[row + 1]; i++) {
    const off = Math.abs(panel.lane[i] + 0.5 - lane);
    if (panel.begin[i] <= t && t <= panel.end[i] && off < distance) { best = i; distance = off; }
  }
  return best;
}

function zoom(next) {
  const t0 = Math.max(0, next.t0), t1 = Math.min(data.ticks, next.t1);
  const r0 = Math.max(0, Math.floor(next.r0)), r1 = Math.min(most_rows, Math.ceil(next.r1));
  if (t1 - t0 >= 8 && r1 > r0) view = { t0, t1, r0, r1 };
  all(draw);
}

function zoom_by(times, panel) {
  const i = panel.cursor, span_t = (view.t1 - view.t0) * times, span_r = Math.max(1, (view.r1 - view.r0) * times);
  const t = i < 0 ? (view.t0 + view.t1) / 2 : (panel.begin[i] + panel.end[i]) / 2;
  const t0 = Math.min(Math.max(0, t - span_t / 2), Math.max(0, data.ticks - span_t));
  const row = i < 0 ? (view.r0 + view.r1) / 2 : row_of(panel, i) + 0.5;
  const r0 = Math.min(Math.max(0, row - span_r / 2), Math.max(0, most_rows - span_r));
  zoom({ t0, t1: t0 + span_t, r0, r1: r0 + span_r });
}

function move_cursor(panel, key) {
  const count = panel.begin.length, i = panel.cursor;
  if (!count) return;
  let next = i < 0 ? 0 : i;
  if (i >= 0 && key === "ArrowRight") next = Math.min(count - 1, i + 1);
  if (i >= 0 && key === "ArrowLeft") next = Math.max(0, i - 1);
  if (i >= 0 && (key === "ArrowUp" || key === "ArrowDown")) {
    const row = row_of(panel, i) + (key === "ArrowUp" ? -1 : 1);
    if (row < 0 || row >= panel.run.replicas.length) return;
    next = panel.offsets[row];
    const off = (k) => Math.abs(panel.begin[k] - panel.begin[i]);
    for (let k = next; k < panel.offsets[row + 1]; k++) if (off(k) < off(next)) next = k;
  }
  panel.cursor = next;
  const row = row_of(panel, next);
  if (panel.begin[next] < view.t0 || panel.end[next] > view.t1 || row < view.r0 || row >= view.r1) zoom_by(1, panel);
  else draw_marked(panel);
  const box = panel.base.getBoundingClientRect();
  show_tip(panel, next, box.left + x_of(panel, panel.end[next]), box.top + y_of(row));
  told.textContent = data.samples[panel.sample[next]] + ": " + place(panel, next);
}

all((panel) => {
  const base = panel.base;
  base.addEventListener("pointerdown", (e) => { held = { panel, x: e.offsetX, y: e.offsetY, box: null }; });
  base.addEventListener("pointermove", (e) => {
    show_tip(panel, e.buttons ? -1 : span_at(panel, e.offsetX, e.offsetY), e.clientX, e.clientY);
    if (!held || !e.buttons || held.panel !== panel) return;
    held.box = [held.x, held.y, e.offsetX - held.x, e.offsetY - held.y];
    draw_marked(panel);
  });
  base.addEventListener("pointerup", (e) => {
    const from = held;
    held = null;
    if (!from || from.panel !== panel) return;
    if (Math.abs(e.offsetX - from.x) > 5) {
      const [x0, x1] = [from.x, e.offsetX].sort((a, b) => a - b), [y0, y1] = [from.y, e.offsetY].sort((a, b) => a - b);
      const flat = y1 - y0 < 8;
      zoom({ t0: time_at(panel, x0), t1: time_at(panel, x1), r0: flat ? view.r0 : rows_at(y0), r1: flat ? view.r1 : rows_at(y1) });
    } else {
      const i = span_at(panel, e.offsetX, e.offsetY);
      mark(i < 0 ? -1 : panel.sample[i]);
    }
  });
  base.addEventListener("pointerleave", () => { held = null; tip.hidden = true; draw_marked(panel); });
  base.addEventListener("blur", () => { panel.cursor = -1; tip.hidden = true; draw_marked(panel); });
  base.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    if (e.key.startsWith("Arrow")) move_cursor(panel, e.key);
    else if (e.key === "Enter" || e.key === " ") { if (panel.cursor >= 0) mark(panel.sample[panel.cursor]); }
    else if (e.key === "Escape") mark(-1);
    else if (e.key === "+" || e.key === "=") zoom_by(0.5, panel);
    else if (e.key === "-") zoom_by(2, panel);
    else if (e.key === "0") zoom(whole);
    else return;
    e.preventDefault();
  });
});
colour.value = colour_by;
colour.addEventListener("change", () => { colour_by = colour.value; all(draw); });
document.getElementById("whole").addEventListener("click", () => zoom(whole));
find.addEventListener("change", () => {
  const exact = data.samples.indexOf(find.value);
  const found = exact >= 0 ? exact : data.samples.findIndex((id) => find.value && id.includes(find.value));
  mark(found);
  if (found < 0 && find.value) told.textContent = "No sample shown has that in its id.";
});

const dark = window.matchMedia("(prefers-color-scheme: dark)"); // paper is light
const printing = (on) => { document.documentElement.toggleAttribute("data-print", on); if (dark.matches) all(draw); };
window.addEventListener("beforeprint", () => printing(true));
window.addEventListener("afterprint", () => printing(false));
dark.addEventListener("change", () => all(draw));
window.addEventListener("resize", () => all(draw));
all(draw);
tell();
