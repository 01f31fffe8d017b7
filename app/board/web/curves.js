// The curves of the last minutes, or of a whole recorded run with a mark at the moment that is shown.
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const LEFT = 46, RIGHT = 56, TOP = 8, BOTTOM = 22;
const KEPT_S = 900;
let moments = []; // of a live service; of a recorded run all of them
let pointed = null;

const last_moment = () => (recorded ? moments.findLast((one) => one.at_s <= at_s + 1e-6) : moments[moments.length - 1]);
function note_moments(changed) {
  if (recorded) return;
  for (const [name, one] of Object.entries(changed || {})) if (one) moments.push({ at_s: +name, ...one });
  moments.sort((one, other) => one.at_s - other.at_s);
  while (moments.length && moments[0].at_s < at_s - KEPT_S) moments.shift();
}

function draw() {
  const canvas = byId("curves"), ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  if (moments.length < 2) return;
  const begin = moments[0].at_s, end = moments[moments.length - 1].at_s;
  const x = (at) => LEFT + ((at - begin) / (end - begin)) * (width - LEFT - RIGHT);
  const samples = Math.max(1, ...moments.map((one) => Math.max(one.running, one.waiting)));
  const tokens = Math.max(1, ...moments.map((one) => one.tokens_per_s || 0));
  const y = (value, high) => TOP + (1 - value / high) * (height - TOP - BOTTOM);
  shade_tails(pen, x, height);
  for (const [name, colour, high] of [["running", "--s1", samples], ["waiting", "--s2", samples], ["tokens_per_s", "--s3", tokens]]) {
    pen.strokeStyle = theme(colour);
    pen.lineWidth = 1.6;
    pen.beginPath();
    for (const one of moments) if (one[name] !== null) pen.lineTo(x(one.at_s), y(one[name], high));
    pen.stroke();
  }
  label(pen, width, height, begin, end, samples, tokens);
  if (recorded) line_at(pen, x(Math.min(end, Math.max(begin, at_s))), height, "--soft");
  if (pointed !== null) mark(pen, x, height);
}
function shade_tails(pen, x, height) {
  pen.fillStyle = theme("--tail");
  for (let i = 1, from = null; i <= moments.length; i++) { // each tail as one piece
    const within = i < moments.length && moments[i].tail;
    if (within && from === null) from = x(moments[i - 1].at_s);
    if (!within && from !== null) {
      pen.fillRect(from, TOP, x(moments[i - 1].at_s) - from, height - TOP - BOTTOM);
      from = null;
    }
  }
}
function label(pen, width, height, begin, end, samples, tokens) {
  pen.fillStyle = theme("--soft");
  pen.textAlign = "right";
  pen.fillText(count(samples), LEFT - 6, TOP + 8);
  pen.fillText("0", LEFT - 6, height - BOTTOM);
  pen.textAlign = "left";
  pen.fillText(brief(tokens) + "/s", width - RIGHT + 6, TOP + 8);
  pen.fillText(clock(begin), LEFT, height - 6);
  pen.textAlign = "right";
  pen.fillText(clock(end), width - RIGHT, height - 6);
}
function line_at(pen, x, height, colour) {
  pen.fillStyle = theme(colour);
  pen.fillRect(x, TOP, 1, height - TOP - BOTTOM);
}
function mark(pen, x, height) {
  const one = moments[Math.min(pointed, moments.length - 1)];
  line_at(pen, x(one.at_s), height, "--mark");
  byId("told").textContent = `${clock(one.at_s)}: ${one.running} running, ${one.waiting} waiting, ${count(one.tokens_per_s)} tokens/s, ${plural(one.replicas, "replica")} ready`;
}
function point_at(share) {
  pointed = moments.length ? Math.max(0, Math.min(moments.length - 1, Math.round(share * (moments.length - 1)))) : null;
  draw();
}
byId("curves").addEventListener("pointermove", (event) => point_at((event.offsetX - LEFT) / (event.target.clientWidth - LEFT - RIGHT)));
byId("curves").addEventListener("pointerleave", () => { pointed = null; byId("told").textContent = ""; draw(); });
byId("curves").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || !moments.length) return;
  event.preventDefault();
  point_at(((pointed ?? moments.length - 1) + step) / Math.max(1, moments.length - 1));
});
window.addEventListener("resize", draw);
