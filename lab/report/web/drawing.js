// Replica timelines. A row is a replica, a lane within it one of its running samples, a colour a role or a sample. All
// panels share one view (time and rows).
const RIGHT = 10, TOP = 16, BOTTOM = 34;
const whole = { t0: 0, t1: data.ticks, r0: 0, r1: most_rows };
let view = { ...whole }, marked = data.marked, held = null, colour_by = data.colour;

const short = (v) => (v >= 1e6 ? v / 1e6 + " M" : v >= 1e4 ? v / 1e3 + " K" : v.toLocaleString("en"));
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- geometry ----
const LEFT = 20 + Math.min(90, 6.6 * Math.max(4, ...data.runs.flatMap((run) => run.replicas.map((name) => String(name).length))));
const plot_height = () => Math.min(480, Math.max(90, most_rows * Math.max(44, lanes * 8)));
const x_of = (panel, t) => LEFT + (t - view.t0) / (view.t1 - view.t0) * (panel.width - LEFT - RIGHT);
const row_height = () => plot_height() / (view.r1 - view.r0);
const y_of = (row) => TOP + (row - view.r0) * row_height();
const strip_height = () => (!panels[0].bands || row_height() < 8 ? 0 : row_height() < 20 ? 2 : 4);
const lane_height = () => (row_height() - strip_height() - (row_height() > 6 ? 2 : 0)) / lanes;
const LEAST_INK = 0.3; // of a pixel: one sample on its own stays visible when hundreds of rows share the height
const MOST_MOVES = 1500; // in view: with more of them only those of the tail's samples are drawn, then none
const ticks = (low, high, most) => {
  const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999), found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * 1.000001; n++) found.push(Number((n * step).toPrecision(12)));
  return found;
};

// ---- drawing ----
function fit(canvas, width) {
  const ratio = window.devicePixelRatio || 1, height = TOP + plot_height() + BOTTOM;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  return pen;
}

function clip(panel, pen) {
  pen.beginPath();
  pen.rect(LEFT, TOP, panel.width - LEFT - RIGHT, plot_height());
  pen.clip();
}

function sample_colour(sample, dark) { // one hue wherever it goes; those that no tail waited for are paler
  const hue = Math.round((late[sample] || sample) * 137.508) % 360; // neighbours in order lie far apart
  const vivid = late[sample] || !data.last.length;
  if (dark) return vivid ? `hsl(${hue} 75% 58%)` : `hsl(${hue} 30% 36%)`;
  return vivid ? `hsl(${hue} 78% 44%)` : `hsl(${hue} 48% 78%)`;
}

function paint() {
  if (colour_by === "role") {
    const colours = data.roles.map((_, role) => theme("--r" + Math.min(7, role)));
    return (panel, i) => colours[panel.role[i]];
  }
  const dark = theme("--dark") === "1", colours = data.samples.map((_, sample) => sample_colour(sample, dark));
  return (panel, i) => colours[panel.sample[i]];
}

function each_in_view(panel, items, step) { // of spans or bands, by row
  const last_row = Math.min(panel.run.replicas.length, Math.ceil(view.r1));
  for (let row = Math.floor(view.r0); row < last_row; row++) {
    for (let i = items.offsets[row]; i < items.offsets[row + 1]; i++) {
      if (items.end[i] >= view.t0 && items.begin[i] <= view.t1) step(i, row);
    }
  }
}

function draw(panel) {
  panel.width = panel.base.parentElement.clientWidth;
  const pen = fit(panel.base, panel.width);
  pen.save();
  clip(panel, pen);
  draw_up(panel, pen);
  draw_tails(panel, pen);
  draw_spans(panel, pen);
  draw_moves(panel, pen);
  draw_strips(panel, pen);
  pen.restore();
  draw_axes(panel, pen);
  draw_marked(panel);
}

function draw_up(panel, pen) { // where a replica is not up, its row is filled
  if (!panel.bands) return;
  pen.fillStyle = theme("--gone");
  pen.fillRect(LEFT, TOP, panel.width - LEFT - RIGHT, plot_height());
  pen.fillStyle = theme("--paper");
  each_in_view(panel, panel.bands, (i, row) => {
    const x = x_of(panel, panel.bands.begin[i]);
    pen.fillRect(x, y_of(row), x_of(panel, panel.bands.end[i]) - x + 0.5, row_height() - (row_height() > 6 ? 1 : 0));
  });
}

function draw_tails(panel, pen) {
  pen.fillStyle = theme("--tail");
  for (const [begin_s, end_s] of panel.run.tails || []) {
    const x = x_of(panel, begin_s / tick_s);
    pen.fillRect(x, TOP, x_of(panel, end_s / tick_s) - x, plot_height());
  }
}

function draw_spans(panel, pen) {
  const colour = paint(), by_sample = colour_by === "sample", tall = Math.max(LEAST_INK, lane_height());
  const hatch = hatched(pen), signs = [];
  each_in_view(panel, panel, (i, row) => {
    const x = x_of(panel, panel.begin[i]), w = x_of(panel, panel.end[i]) - x, role = panel.role[i];
    const y = y_of(row) + panel.lane[i] * lane_height(), wide = Math.max(w > 3 ? w - 0.5 : w, 0.6);
    pen.fillStyle = colour(panel, i);
    pen.globalAlpha = by_sample && role === PREFILL ? 0.4 : 1;
    pen.fillRect(x, y, wide, tall);
    pen.globalAlpha = 1;
    if (role !== LOST && role !== WON && role !== RACE) return;
    if (by_sample && role !== WON) {
      pen.fillStyle = hatch;
      pen.fillRect(x, y, wide, tall);
    }
    if (role !== RACE && tall > 3) signs.push([role === WON ? "★" : "×", x + wide, y + tall / 2]);
  });
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillStyle = theme("--ink");
  pen.strokeStyle = theme("--paper");
  pen.lineWidth = 2.5;
  for (const [sign, x, y] of signs.length > MOST_MOVES ? [] : signs) {
    pen.strokeText(sign, Math.min(x, panel.width - RIGHT - 5), y);
    pen.fillText(sign, Math.min(x, panel.width - RIGHT - 5), y);
  }
  pen.textBaseline = "alphabetic";
  pen.lineWidth = 1;
}

function hatched(pen) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ink = tile.getContext("2d");
  ink.strokeStyle = theme("--paper");
  ink.lineWidth = 1.6;
  for (const shift of [-6, 0, 6]) { ink.moveTo(shift, 6); ink.lineTo(shift + 6, 0); }
  ink.stroke();
  return pen.createPattern(tile, "repeat");
}

const middle_of = (panel, i) => y_of(row_of(panel, i)) + (panel.lane[i] + 0.5) * lane_height();

function draw_moves(panel, pen) {
  if (!panel.bands) return;
  let moves = panel.moves.filter(([, to]) => panel.begin[to] >= view.t0 && panel.begin[to] <= view.t1);
  if (moves.length > MOST_MOVES) moves = moves.filter(([from]) => late[panel.sample[from]]);
  pen.strokeStyle = theme("--ink");
  pen.globalAlpha = Math.min(0.75, Math.max(0.15, 60 / moves.length));
  if (moves.length <= MOST_MOVES) for (const move of moves) draw_move(panel, pen, move);
  pen.globalAlpha = 1;
}

function draw_move(panel, pen, [from, to]) {
  pen.beginPath();
  pen.moveTo(x_of(panel, Math.min(panel.end[from], panel.begin[to])), middle_of(panel, from));
  pen.lineTo(x_of(panel, panel.begin[to]), middle_of(panel, to));
  pen.stroke();
}

function draw_strips(panel, pen) { // below the samples of a row: what its replica as a whole does
  if (!strip_height()) return;
  const colours = data.bands.map((_, role) => theme("--b" + role)), bands = panel.bands;
  each_in_view(panel, bands, (i, row) => {
    const x = x_of(panel, bands.begin[i]), y = y_of(row) + row_height() - strip_height() - 1;
    pen.fillStyle = colours[bands.role[i]];
    pen.fillRect(x, y, Math.max(0.6, x_of(panel, bands.end[i]) - x), strip_height());
  });
}

function draw_axes(panel, pen) {
  const floor = TOP + plot_height(), ink = theme("--ink"), soft = theme("--soft");
  pen.fillStyle = pen.strokeStyle = soft;
  pen.textAlign = "center";
  for (const s of ticks(view.t0 * tick_s, view.t1 * tick_s, Math.max(3, panel.width / 110))) {
    const x = x_of(panel, s / tick_s);
    pen.fillRect(x, floor, 1, 4);
    pen.fillText(short(s), x, floor + 16);
  }
  pen.fillText("seconds", LEFT + (panel.width - LEFT - RIGHT) / 2, floor + 30);
  pen.fillRect(LEFT, floor, panel.width - LEFT - RIGHT, 1);
  pen.textAlign = "right";
  for (const row of ticks(view.r0, view.r1, Math.min(8, plot_height() / 20))) {
    if (row % 1 === 0 && row < panel.run.replicas.length && row < view.r1)
      pen.fillText(panel.run.replicas[row], LEFT - 6, Math.max(TOP + 9, y_of(row) + Math.min(row_height(), 26) / 2 + 4));
  }
  pen.strokeStyle = pen.fillStyle = ink;
  const limits = [...Object.entries(panel.run.bounds).map(([name, s]) => [name + " bound", s, [4, 3]]),
    ...(panel.run.tails || []).map(([begin_s]) => ["tail", begin_s, [2, 3]]),
    ["end", panel.run.makespan_s, []]].sort((a, b) => a[1] - b[1]);
  let free_from = 0;
  for (const [name, s, dash] of limits) {
    const x = x_of(panel, s / tick_s), half = pen.measureText(name).width / 2 + 3;
    if (s / tick_s < view.t0 || s / tick_s > view.t1 * 1.000001) continue;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(x, TOP - 2);
    pen.lineTo(x, floor);
    pen.stroke();
    const centre = Math.min(Math.max(x, free_from + half), panel.width - half);
    pen.textAlign = "center";
    if (centre >= free_from + half - 1) pen.fillText(name, centre, TOP - 5);
    free_from = centre + half;
  }
  pen.setLineDash([]);
}

function path_of(panel) {
  const path = [];
  if (marked >= 0) panel.sample.forEach((sample, i) => { if (sample === marked) path.push(i); });
  return path.sort((a, b) => panel.begin[a] - panel.begin[b]);
}

function draw_marked(panel) {
  const pen = fit(panel.over, panel.width); // not clearRect: on paper that wipes out what lies beneath
  pen.save();
  clip(panel, pen);
  pen.fillStyle = pen.strokeStyle = theme("--mark");
  const middle = (i) => middle_of(panel, i), tall = Math.max(3, lane_height());
  for (const i of path_of(panel)) {
    const x = x_of(panel, panel.begin[i]);
    pen.fillRect(x, middle(i) - tall / 2, Math.max(2, x_of(panel, panel.end[i]) - x), tall);
  }
  if (marked >= 0) for (const move of panel.moves) if (panel.sample[move[1]] === marked) draw_move(panel, pen, move);
  if (panel.cursor >= 0) {
    const x = x_of(panel, panel.begin[panel.cursor]), w = x_of(panel, panel.end[panel.cursor]) - x;
    pen.lineWidth = 2;
    pen.strokeRect(x - 2, middle(panel.cursor) - tall / 2 - 2, Math.max(2, w) + 4, tall + 4);
  }
  if (held && held.panel === panel && held.box) pen.strokeRect(...held.box);
  pen.restore();
}
