"use strict";
// Replica timelines. A row is a replica, a lane within it one of its running samples, a colour a role. All panels share
// one view (time and rows). Ids are data: they reach the page as textContent and canvas text only.
(() => {
  const data = JSON.parse(document.getElementById("spans").textContent);
  const find = document.getElementById("find"), told = document.getElementById("told");
  const tip = document.getElementById("tip");
  const LEFT = 46, RIGHT = 10, TOP = 16, BOTTOM = 34;
  const tick_s = data.horizon_s / data.ticks || 1;
  const most_rows = Math.max(1, ...data.runs.map((run) => run.replicas.length));
  const whole = { t0: 0, t1: data.ticks, r0: 0, r1: most_rows };
  let view = { ...whole }, marked = data.marked, held = null;

  const unpack = (text, Kind) => new Kind(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const short = (v) => (v >= 1e6 ? v / 1e6 + " M" : v >= 1e4 ? v / 1e3 + " K" : v.toLocaleString("en"));
  const seconds = (ticks) => Number((ticks * tick_s).toPrecision(5)).toLocaleString("en", { maximumFractionDigits: 6 }) + " s";
  const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const panels = data.runs.map((run, index) => {
    const base = document.getElementById("run" + index);
    const panel = { run, base, over: base.nextElementSibling, offsets: run.offsets, cursor: -1, lanes: 1 };
    for (const [name, Kind] of [["sample", Uint32Array], ["role", Uint8Array], ["begin", Uint16Array],
      ["end", Uint16Array], ["tokens", Uint32Array]]) panel[name] = unpack(run[name], Kind);
    panel.lane = new Uint16Array(panel.begin.length);
    for (let row = 0; row < run.replicas.length; row++) {
      const free_at = [];
      for (let i = run.offsets[row]; i < run.offsets[row + 1]; i++) {
        let lane = 0;
        while (lane < free_at.length && free_at[lane] > panel.begin[i]) lane++;
        free_at[lane] = panel.end[i];
        panel.lane[i] = lane;
      }
      panel.lanes = Math.max(panel.lanes, free_at.length);
    }
    return panel;
  });
  const lanes = Math.max(...panels.map((panel) => panel.lanes));

  // ---- geometry ----
  const plot_height = () => Math.min(420, Math.max(90, most_rows * 26));
  const x_of = (panel, t) => LEFT + (t - view.t0) / (view.t1 - view.t0) * (panel.width - LEFT - RIGHT);
  const row_height = () => plot_height() / (view.r1 - view.r0);
  const y_of = (row) => TOP + (row - view.r0) * row_height();
  const lane_height = () => (row_height() - (row_height() > 6 ? 2 : 0)) / lanes;
  const LEAST_INK = 0.3; // of a pixel: one sample on its own stays visible when hundreds of rows share the height
  const row_of = (panel, i) => {
    let low = 0, high = panel.offsets.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (panel.offsets[mid] <= i) low = mid; else high = mid; }
    return low;
  };
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

  function draw(panel) {
    panel.width = panel.base.parentElement.clientWidth;
    const pen = fit(panel.base, panel.width);
    const colours = [0, 1, 2, 3, 4, 5].map((n) => theme("--r" + n));
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, panel.width - LEFT - RIGHT, plot_height());
    pen.clip();
    const last_row = Math.min(panel.run.replicas.length, Math.ceil(view.r1));
    for (let row = Math.floor(view.r0); row < last_row; row++) {
      for (let i = panel.offsets[row]; i < panel.offsets[row + 1]; i++) {
        if (panel.end[i] < view.t0 || panel.begin[i] > view.t1) continue;
        const x = x_of(panel, panel.begin[i]), w = x_of(panel, panel.end[i]) - x;
        pen.fillStyle = colours[Math.min(5, panel.role[i])];
        pen.fillRect(x, y_of(row) + panel.lane[i] * lane_height(), Math.max(w > 3 ? w - 0.5 : w, 0.6),
          Math.max(LEAST_INK, lane_height()));
      }
    }
    pen.restore();
    draw_axes(panel, pen);
    draw_marked(panel);
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
    pen.beginPath();
    pen.rect(LEFT, TOP, panel.width - LEFT - RIGHT, plot_height());
    pen.clip();
    pen.fillStyle = pen.strokeStyle = theme("--mark");
    const middle = (i) => y_of(row_of(panel, i)) + (panel.lane[i] + 0.5) * lane_height(), tall = Math.max(3, lane_height());
    let before = -1;
    for (const i of path_of(panel)) {
      const x = x_of(panel, panel.begin[i]);
      pen.fillRect(x, middle(i) - tall / 2, Math.max(2, x_of(panel, panel.end[i]) - x), tall);
      if (before >= 0) {
        pen.beginPath();
        pen.moveTo(x_of(panel, panel.end[before]), middle(before));
        pen.lineTo(x, middle(i));
        pen.stroke();
      }
      before = i;
    }
    if (panel.cursor >= 0) {
      const x = x_of(panel, panel.begin[panel.cursor]), w = x_of(panel, panel.end[panel.cursor]) - x;
      pen.lineWidth = 2;
      pen.strokeRect(x - 2, middle(panel.cursor) - tall / 2 - 2, Math.max(2, w) + 4, tall + 4);
    }
    if (held && held.panel === panel && held.box) pen.strokeRect(...held.box);
    pen.restore();
  }

  const all = (step) => panels.forEach(step);

  // ---- words ----
  const place = (panel, i) => `replica ${panel.run.replicas[row_of(panel, i)]}, ${data.roles[panel.role[i]]}, ` +
    `${seconds(panel.begin[i])} to ${seconds(panel.end[i])}, ${panel.tokens[i].toLocaleString("en")} tokens`;

  const MAKES = ["generate", "race"]; // prefill and fetch count tokens that were there already
  function journey(panel) {
    const path = path_of(panel), stays = [];
    if (!path.length) return "not shown";
    let tokens = 0;
    for (const i of path) {
      const replica = panel.run.replicas[row_of(panel, i)];
      if (stays[stays.length - 1] !== replica) stays.push(replica);
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
})();
