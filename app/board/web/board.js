"use strict";
// The board: each look from the stream replaces the tables; the curves keep the last minutes.
const KEPT_S = 900;
const byId = (id) => document.getElementById(id);
const count = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en"));
const percent = (part, whole) => (whole ? Math.round((100 * part) / whole) + " %" : "–");
const clock = (s) => new Date(1000 * s).toLocaleTimeString();
let moments = [], shown = null, last_at_ms = 0;

// ---- parts ----
function element(name, attributes, ...children) { // text is text: nothing that comes from a service is markup
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "style") for (const [property, of] of Object.entries(value)) made.style.setProperty(property, of);
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return made;
}
function bar(part, whole, colour) {
  const share = whole ? Math.min(1, part / whole) : 0;
  const inner = element("i", { style: { width: 100 * share + "%" } });
  return element("span", { class: "bar", role: "img", "aria-label": percent(part, whole), style: { "--c": colour || "var(--s1)" } }, inner);
}
const digest = (name) => [...name].reduce((sum, letter) => Math.imul(sum ^ letter.codePointAt(0), 16777619), 2166136261) >>> 0;
const hue = (name) => (360 * 0.6180339887498949 * (digest(name) % 100003)) % 360; // names that differ in a digit lie far apart
const colour_of = (name) => `hsl(${hue(name)} 65% 50%)`;
const short = (name) => name.slice(name.indexOf("/") + 1); // of a sample: without its batch

function fill(id, heads, rows) {
  const table = byId(id);
  const focused = document.activeElement && table.contains(document.activeElement) ? document.activeElement.dataset.sample : null;
  const head = element("thead", {}, element("tr", {}, ...heads.map((name) => element("th", { scope: "col", class: name.startsWith("<") ? "left" : "" }, name.replace("<", "")))));
  const lines = rows.map((cells) => element("tr", {}, ...cells.map((cell, place) => element("td", { class: heads[place].startsWith("<") ? "left" : "" }, cell))));
  table.replaceChildren(head, element("tbody", {}, ...lines));
  if (focused) table.querySelector(`[data-sample="${CSS.escape(focused)}"]`)?.focus();
}
function sample_button(sample, text) {
  const title = `${sample.tokens} tokens of about ${sample.expected_tokens}, ${sample.state}`;
  const made = element("button", { type: "button", title, "data-sample": sample.sample_id, style: { "--c": colour_of(sample.sample_id) } }, text);
  made.addEventListener("click", () => open_sample(sample.sample_id));
  return made;
}

// ---- a look ----
function show(look) {
  last_at_ms = Date.now();
  if (look.moments) moments = look.moments;
  else if (look.moment) moments.push(look.moment);
  show_news(look.news || []);
  if (look.away) return say_state("the service is away", true);
  while (moments.length && moments[0].at_s < look.at_s - KEPT_S) moments.shift();
  say_state(look.paused ? "paused" : `live, ${clock(look.at_s)}`, look.paused);
  byId("model").textContent = `${look.model}, weights ${look.weights}` + (look.digest ? ` (${look.digest})` : "");
  byId("troubles").replaceChildren(...look.troubles.map((line) => element("li", {}, line)));
  byId("pool").textContent = look.pool || "no pool";
  show_numbers(look);
  show_batches(look.batches);
  show_replicas(look);
  show_longest(look.longest);
  draw();
}
function say_state(text, bad) {
  byId("state").textContent = text;
  byId("state").className = bad ? "bad" : "";
}
function show_numbers(look) {
  const now = look.moment, ready = look.replicas.filter((one) => one.state === "ready").length;
  const numbers = [["tokens/s", count(now.tokens_per_s)], ["running", count(now.running)], ["waiting", count(now.waiting)],
    ["held between turns", count(now.held)], ["replicas ready", `${ready} of ${look.replicas.length}`]];
  byId("numbers").replaceChildren(...numbers.map(([name, value]) => element("div", {}, element("b", {}, value), name)));
}
function show_batches(batches) {
  fill("batches", ["batch", "<ended", "samples", "groups out", "tokens", "tokens/s", "seconds", "<"], batches.map((one) => [
    one.batch_id, bar(one.ended, one.samples), `${count(one.ended)}/${count(one.samples)}`, `${one.emitted}/${one.groups}`,
    count(one.tokens), count(one.tokens_per_s), count(one.seconds), one.tail ? element("span", { class: "badge" }, "tail") : "",
  ]));
}
function show_replicas(look) {
  const samples = new Map();
  for (const sample of look.longest) {
    if (sample.state === "running") samples.set(sample.replica_id, [...(samples.get(sample.replica_id) || []), sample]);
  }
  fill("replicas", ["replica", "<state", "<running", "<KV", "tokens/s", "per step", "<accepted", "weights", "<samples, the longest first"], look.replicas.map((one) => [
    one.replica_id, one.state === "ready" ? "ready" : element("span", { class: "badge", title: one.aside }, one.state),
    element("span", {}, bar(one.running, one.max_running), ` ${one.running}/${one.max_running}`),
    element("span", {}, bar(one.kv_used_share, 1, "var(--s4)"), ` ${percent(one.kv_used_share, 1)}`),
    count(one.tokens_per_s), one.tokens_per_step === null ? "–" : one.tokens_per_step.toFixed(2),
    Object.entries(one.accepted).map(([name, part]) => `${name} ${percent(part, 1)}`).join(", ") || "–", one.weights,
    element("span", { class: "chips" }, ...(samples.get(one.replica_id) || []).slice(0, 12).map((sample) => sample_button(sample, count(sample.tokens)))),
  ]));
}
function show_longest(longest) {
  fill("longest", ["sample", "<state", "<replica", "<tokens", "tokens", "expected", "max", "chunks", "copies"], longest.slice(0, 20).map((one) => [
    sample_button(one, short(one.sample_id)), one.state, one.replica_id || "–", bar(one.tokens, one.expected_tokens, colour_of(one.sample_id)),
    count(one.tokens), count(one.expected_tokens), count(one.max_tokens), one.chunks, one.copies,
  ]));
}
function show_news(lines) {
  const newest = [...lines].reverse();
  byId("news").replaceChildren(...newest.map((one) => element("li", {}, element("time", {}, clock(one.at_s)), one.text)));
}

// ---- one sample ----
async function open_sample(id) {
  shown = id;
  byId("sample-name").textContent = id;
  byId("text").textContent = byId("sample-said").textContent = "";
  byId("segments").replaceChildren();
  if (!byId("sample").open) byId("sample").showModal();
  await refresh_sample();
}
async function refresh_sample() {
  const id = shown, answer = await fetch("/sample?id=" + encodeURIComponent(id)).catch(() => null);
  if (id !== shown || answer === null) return;
  if (answer.status !== 200) {
    byId("sample-said").textContent = "it has ended";
    return;
  }
  const one = await answer.json();
  byId("sample-said").textContent = `${count(one.tokens)} tokens in ended chunks; of ${count(one.drafted_tokens)} drafted tokens ${count(one.accepted_tokens)} accepted; ` +
    `context computed ${count(one.computed_tokens)}, found ${count(one.cached_tokens)}`;
  fill("segments", ["from", "to", "<replica", "weights"], one.segments.map((part) => [count(part.start), count(part.end), part.replica_id, part.weights_version]));
  const text = byId("text"), follows = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
  text.textContent = (one.text_tokens < one.tokens ? "… " : "") + one.text;
  if (follows) text.scrollTop = text.scrollHeight;
}
byId("close").addEventListener("click", () => byId("sample").close());
byId("sample").addEventListener("close", () => { shown = null; });

// ---- curves ----
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const LEFT = 46, RIGHT = 50, TOP = 8, BOTTOM = 22;
let pointed = null;

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
  pen.fillText(count(tokens) + "/s", width - RIGHT + 6, TOP + 8);
  pen.fillText(clock(begin), LEFT, height - 6);
  pen.textAlign = "right";
  pen.fillText(clock(end), width - RIGHT, height - 6);
}
function mark(pen, x, height) {
  const one = moments[Math.min(pointed, moments.length - 1)];
  pen.fillStyle = theme("--mark");
  pen.fillRect(x(one.at_s), TOP, 1, height - TOP - BOTTOM);
  byId("told").textContent = `${clock(one.at_s)}: ${one.running} running, ${one.waiting} waiting, ${count(one.tokens_per_s)} tokens/s, ${one.replicas} replicas ready`;
}
function point_at(share) {
  pointed = moments.length ? Math.max(0, Math.min(moments.length - 1, Math.round(share * (moments.length - 1)))) : null;
  draw();
}
byId("curves").addEventListener("pointermove", (event) => point_at((event.offsetX - LEFT) / (event.target.clientWidth - LEFT - RIGHT)));
byId("curves").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || !moments.length) return;
  event.preventDefault();
  point_at(((pointed ?? moments.length - 1) + step) / (moments.length - 1));
});
window.addEventListener("resize", draw);

// ---- the stream ----
const stream = new EventSource("/looks"); // it connects again by itself
stream.onmessage = (event) => show(JSON.parse(event.data));
stream.onerror = () => say_state("the board's process is away", true);
setInterval(() => {
  if (shown !== null) refresh_sample();
}, 1000);
