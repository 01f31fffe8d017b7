// Where deltas come from: the stream of a running service, or the frames of a recorded run that a slider chooses among.
let due = {}; // sections that have changed since the page was drawn
function show_soon(sections) {
  if (!Object.keys(due).length) setTimeout(() => { const now = due; due = {}; show(now); }, 50);
  Object.assign(due, Object.fromEntries(Object.keys(sections).map((name) => [name, true])));
}
function say_state(text, bad) {
  byId("state").textContent = text;
  byId("state").className = bad ? "bad" : "";
}

// ---- live ----
function take(delta) {
  if (delta.error) return say_state(delta.error, true);
  if (delta.whole) {
    const gone = state;
    state = {};
    moments = [];
    for (const name of Object.keys(gone)) due[name] = true;
  }
  at_s = delta.at_s;
  fold(delta.sections);
  note_moments(delta.sections.moments);
  const away = row("board", "away"), paused = row("service", "paused");
  say_state(away ? `the service is away: ${away}` : paused ? "paused" : `live, ${clock(at_s)}`, away || paused);
  show_soon(delta.whole ? { ...state, service: 1, replicas: 1, waiting: 1, acceptance: 1, faults: 1 } : { batches: 1, ...delta.sections });
}
function follow() {
  const stream = new EventSource("/board/stream"); // it connects again by itself, and gets the whole state then
  stream.onmessage = (event) => { if (event.data !== "[DONE]") take(JSON.parse(event.data)); };
  stream.onerror = () => {
    say_state("the board's process is away", true);
    if (stream.readyState === EventSource.CLOSED) setTimeout(follow, 2000); // it was answered with an error
  };
}

// ---- recorded ----
let frames = [], at_frame = -1, playing = null;
function seek(s) {
  s = Math.max(0, Math.min(s, +byId("slider").max));
  let frame = frames.findLastIndex((one) => one.at_s <= s + 1e-6);
  if (frame < at_frame) {
    state = {};
    at_frame = -1;
  }
  at_s = s;
  while (at_frame < frame) fold(frames[++at_frame].sections);
  byId("slider").value = s;
  byId("slider-said").textContent = `${clock(s)} of ${clock(+byId("slider").max)}`;
  byId("slider").setAttribute("aria-valuetext", byId("slider-said").textContent);
  say_state(`recorded, at ${clock(s)}`, false);
  show(Object.fromEntries(SHOWN.flatMap(([, of]) => of.map((name) => [name, true]))));
}
function play() {
  if (playing !== null) {
    clearInterval(playing);
    playing = null;
  } else {
    if (at_s >= +byId("slider").max) seek(0);
    playing = setInterval(() => {
      seek(at_s + 0.1 * +byId("speed").value);
      if (at_s >= +byId("slider").max) play();
    }, 100);
  }
  byId("play").textContent = playing === null ? "Play" : "Pause";
}
async function load() {
  const recording = await (await fetch("/board/recording")).json();
  frames = recording.frames;
  moments = frames.flatMap((one) => Object.entries(one.sections.moments || {}).map(([name, moment]) => ({ at_s: +name, ...moment })));
  byId("player").hidden = false;
  byId("curves-name").textContent = `The run: ${recording.name}`;
  byId("slider").max = frames.length ? frames[frames.length - 1].at_s : 0;
  byId("slider").addEventListener("input", () => seek(+byId("slider").value));
  byId("slider").addEventListener("keydown", (event) => { // a step of a hundredth, whatever the browser's own is
    const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 }[event.key];
    if (!step) return;
    event.preventDefault();
    seek(at_s + (step * +byId("slider").max) / 100);
  });
  byId("play").addEventListener("click", play);
  seek(0);
}

if (recorded) load().catch((error) => say_state(`the recording cannot be read: ${error}`, true));
else follow();
setInterval(() => {
  if (shown !== null && !recorded) refresh_sample();
}, 1000);
