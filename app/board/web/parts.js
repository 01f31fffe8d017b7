"use strict";
// Parts that all of the page uses: the state and how a delta changes it, numbers as text, elements, tables.
const recorded = document.documentElement.dataset.kind === "recorded";
const byId = (id) => document.getElementById(id);
const count = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en"));
const brief = (n) => (n >= 1e6 ? (n / 1e6).toFixed(1) + " M" : count(n));
const percent = (part, whole) => (whole ? Math.round((100 * part) / whole) + " %" : "–");
const mebibytes = (n) => (n >= 1 << 30 ? (n / 2 ** 30).toFixed(2) + " GiB" : (n / 2 ** 20).toFixed(1) + " MiB");
const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

let state = {}; // rows by section and name
let at_s = 0; // of the state: unix seconds, or seconds of a recorded run
const rows = (section) => Object.entries(state[section] || {});
const row = (section, name) => (state[section] || {})[name];

function fold(sections) { // as the service's own `fold`
  for (const [section, changed] of Object.entries(sections)) {
    const known = (state[section] ||= {});
    for (const [name, value] of Object.entries(changed)) {
      if (value === null) delete known[name];
      else known[name] = value;
    }
  }
}
function clock(s) {
  if (!recorded) return new Date(1000 * s).toLocaleTimeString();
  return `${Math.floor(s / 60)}:${(s % 60).toFixed(1).padStart(4, "0")}`;
}

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
  const share = whole ? Math.max(0, Math.min(1, part / whole)) : 0;
  const inner = element("i", { style: { width: 100 * share + "%" } });
  return element("span", { class: "bar", role: "img", "aria-label": percent(part, whole), style: { "--c": colour || "var(--s1)" } }, inner);
}
const badge = (text, title) => element("span", { class: "badge", title: title || "" }, text);
const digest = (name) => [...name].reduce((sum, letter) => Math.imul(sum ^ letter.codePointAt(0), 16777619), 2166136261) >>> 0;
const hue = (name) => (360 * 0.6180339887498949 * (digest(name) % 100003)) % 360; // names that differ in a digit lie far apart
const colour_of = (name) => `hsl(${hue(name)} 65% 50%)`;
const short = (name) => name.slice(name.indexOf("/") + 1); // of a sample: without its batch

function fill(id, heads, lines) { // a head that begins with "<" is left-aligned
  const table = byId(id), active = document.activeElement;
  const focused = active && table.contains(active) ? active.dataset.sample : null;
  const side = (place) => (heads[place].startsWith("<") ? "left" : "");
  const head = element("thead", {}, element("tr", {}, ...heads.map((name, place) => element("th", { scope: "col", class: side(place) }, name.replace("<", "")))));
  const body = lines.map((cells) => element("tr", {}, ...cells.map((cell, place) => element("td", { class: side(place) }, cell))));
  table.replaceChildren(...(lines.length ? [head, element("tbody", {}, ...body)] : []));
  if (focused) table.querySelector(`[data-sample="${CSS.escape(focused)}"]`)?.focus();
}
function fill_lines(id, lines) { // each [seconds, text], the newest first
  const list = byId(id), top = list.scrollTop;
  list.replaceChildren(...lines.map(([s, text]) => element("li", {}, element("time", {}, clock(s)), text)));
  list.scrollTop = top;
}
