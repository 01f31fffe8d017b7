// The tables and numbers of the page, each from the sections that it shows.
const MOST_ROWS = 24; // replicas; a large fleet shows those first that a person must look at
const WINDOW_S = 5;
const marks = new Map(); // by replica: [seconds, its row] of the last WINDOW_S

function note_marks() {
  for (const name of marks.keys()) if (!row("replicas", name)) marks.delete(name);
  for (const [name, one] of rows("replicas")) {
    const of_one = marks.get(name) || [];
    if (of_one.length && of_one[of_one.length - 1][1].made > one.made) of_one.length = 0; // it has restarted
    if (!of_one.length || at_s - of_one[of_one.length - 1][0] > 0.4) of_one.push([at_s, one]);
    while (of_one.length > 2 && at_s - of_one[1][0] >= WINDOW_S) of_one.shift();
    marks.set(name, of_one);
  }
}
function rates_of(name, one) { // tokens a second, tokens a step, and the accepted share by source; null: not known
  if (one.rate !== undefined) return { rate: one.rate, per_step: null, accepted: {} };
  const [first_s, first] = marks.get(name)?.[0] || [at_s, one], seconds = at_s - first_s;
  const made = one.made - first.made, steps = one.steps - first.steps, accepted = {};
  for (const [source, n] of Object.entries(one.drafted)) {
    const drafted = n - (first.drafted[source] || 0);
    if (drafted > 0) accepted[source] = ((one.accepted[source] || 0) - (first.accepted[source] || 0)) / drafted;
  }
  return { rate: seconds > 0 ? made / seconds : null, per_step: steps > 0 ? made / steps : null, accepted };
}

function show_header() {
  const service = state.service || {};
  const weights = service.weights === undefined ? "" : `, weights ${service.weights}` + (service.digest ? ` (${service.digest})` : "");
  byId("model").textContent = (service.model || "").replace(/\/+$/, "").split("/").pop() + weights;
  byId("model").title = service.model || "";
  byId("troubles").replaceChildren(...troubles(service).map((line) => element("li", {}, line)));
  const ready = rows("replicas").filter(([, one]) => one.state === "ready").length;
  const last = last_moment();
  const numbers = [["tokens/s", count(last && last.tokens_per_s)], ["running", count(service.running)], ["waiting", count(service.waiting)],
    ["held between turns", count(service.held)], ["replicas ready", `${ready} of ${rows("replicas").length}`]];
  byId("numbers").replaceChildren(...numbers.map(([name, value]) => element("div", {}, element("b", {}, value), name)));
}
function troubles(service) {
  const found = [];
  if (service.waits_for) found.push(`nothing can run: waits for ${service.waits_for}`);
  for (const [name, one] of rows("replicas")) if (one.aside) found.push(`${name} is set aside: ${one.aside}`);
  if (row("pool", "down")) found.push(`the KV pool is down: ${row("pool", "down")}`);
  for (const [name, why] of rows("pool")) if (name.startsWith("without.")) found.push(`${name.slice(8)} runs without the KV pool: ${why}`);
  if (service.weights_problem) found.push(`weights: ${service.weights_problem}`);
  if (service.at_admission) found.push(`batches wait for a change of policies, limits or journal: ${service.at_admission}`);
  if (service.asleep) found.push(`asleep: ${service.asleep}`);
  return found;
}

function show_batches() {
  const lines = rows("batches").map(([, one]) => [
    one.name, bar(one.ended, one.samples), `${count(one.ended)}/${count(one.samples)}`, `${count(one.emitted)}/${count(one.groups)}`,
    count(one.tokens), count(Math.max(0, at_s - one.began_s)), one.tail ? badge("tail") : "",
  ]);
  fill("batches", ["batch", "<ended", "samples", "groups out", "tokens", "seconds", "<"], lines);
}

function show_replicas() {
  const samples = new Map();
  for (const [id, one] of longest()) {
    if (one.state === "running") samples.set(one.replica, [...(samples.get(one.replica) || []), [id, one]]);
  }
  const all = rows("replicas").sort(([a, one], [b, other]) => (one.state === "ready") - (other.state === "ready") || (rows("replicas").length > MOST_ROWS ? other.running - one.running : 0) || (a < b ? -1 : 1));
  const states = {};
  for (const [, one] of all) states[one.state] = (states[one.state] || 0) + 1;
  const said = Object.entries(states).map(([name, n]) => `${count(n)} ${name}`).join(", ");
  byId("replicas-said").textContent = all.length > MOST_ROWS ? `${said}; ${MOST_ROWS} are listed: those to look at, then the fullest` : said;
  show_fleet(all);
  const lines = all.slice(0, MOST_ROWS).map(([name, one]) => {
    const { rate, per_step, accepted } = rates_of(name, one);
    const chips = (samples.get(name) || []).slice(0, 12).map(([id, sample]) => sample_button(id, sample, count(sample.tokens)));
    return [
      name, one.state === "ready" ? "ready" : badge(one.state, one.aside),
      element("span", {}, bar(one.running, one.max ?? most_running(all)), one.max === undefined ? ` ${one.running}` : ` ${one.running}/${one.max}`),
      one.copies ? element("span", { class: "race" }, plural(one.copies, "copy").replace("copys", "copies")) : "–",
      one.kv === undefined ? "–" : element("span", {}, bar(one.kv, 1, "var(--s4)"), ` ${percent(one.kv, 1)}`), count(rate), per_step === null ? "–" : per_step.toFixed(2),
      Object.entries(accepted).map(([source, part]) => `${source} ${percent(part, 1)}`).join(", ") || "–",
      one.weights, count(one.preempted), element("span", { class: "chips" }, ...chips),
    ];
  });
  fill("replicas", ["replica", "<state", "<chunks", "<races", "<KV", "tokens/s", "per step", "<accepted", "weights", "preempted", "<its longest samples, by tokens"], lines);
}

function show_fleet(all) { // of a large fleet every replica as a square, in the order of names
  const squares = all.length <= MOST_ROWS ? [] : rows("replicas").sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, one]) => {
    const share = Math.min(1, one.running / (one.max ?? most_running(all)));
    return element("i", { title: `${name}: ${one.state}, ${one.running} chunks`, class: one.state === "ready" ? "" : "odd", style: { "--share": 10 + 90 * share + "%" } });
  });
  byId("fleet").replaceChildren(...squares);
}
const most_running = (all) => Math.max(1, ...all.map(([, one]) => one.running));
const longest = () => rows("samples").sort(([, one], [, other]) => other.tokens - one.tokens);
function sample_button(id, sample, text) {
  const title = `${sample.tokens} tokens of about ${sample.expected}, ${sample.state}`;
  const made = element("button", { type: "button", title, "data-sample": id, style: { "--c": colour_of(id) } }, text);
  made.addEventListener("click", () => open_sample(id));
  return made;
}
function show_longest() {
  const lines = longest().slice(0, 20).map(([id, one]) => [
    sample_button(id, one, short(id)), one.state, one.replica || "–", bar(one.tokens, one.expected, colour_of(id)),
    count(one.tokens), count(one.expected), count(one.max), one.chunks, one.why,
  ]);
  fill("longest", ["sample", "<state", "<replica", "<tokens", "tokens", "expected", "max", "chunks", "<why there"], lines);
}

function show_waiting() {
  const lines = rows("waiting").sort(([, one], [, other]) => other - one).map(([why, n]) => [why, count(n)]);
  fill("waiting", ["<waiting for", "samples"], lines.length ? lines : [["none waits", "–"]]);
}
function show_wanted() {
  const service = state.service || {};
  const up = `${plural(service.up ?? rows("replicas").length, "replica")} up`;
  const closing = rows("replicas").filter(([, one]) => one.state === "closing").length;
  const wanted = service.wanted === undefined ? "; their number is fixed" : `; ${count(service.wanted)} wanted: ${service.wanted_why}`;
  byId("wanted").textContent = up + wanted + (closing ? `; ${count(closing)} to be given back` : "");
}
function show_weights() {
  const held = {}, service = state.service || {};
  for (const [, one] of rows("replicas")) if (one.weights !== "") held[one.weights] = (held[one.weights] || 0) + 1;
  const lines = Object.entries(held).map(([version, n]) => [version === "-1" ? "none that counts" : version, count(n), +version === service.weights ? "wanted" : ""]);
  fill("weights", ["<version", "replicas", "<"], lines);
  byId("weights-said").textContent = service.weights_from ? `version ${service.weights} is of ${service.weights_from}` : "";
}

const SOURCES = { local_tokens: "found here", pool_tokens: "from the pool", recomputed_tokens: "computed again" };
function show_pool() {
  const pool = state.pool || {}, known = pool.dram_capacity_bytes !== undefined;
  byId("pool").textContent = !rows("pool").length ? "no pool" : !known ? pool.down || "" :
    `${mebibytes(pool.dram_bytes)} of ${mebibytes(pool.dram_capacity_bytes)} memory` +
    (pool.ssd_capacity_bytes ? `, ${mebibytes(pool.ssd_bytes)} of ${mebibytes(pool.ssd_capacity_bytes)} on disk` : "") +
    `; ${plural(pool.keys, "key")}, ${count(pool.evicted_keys)} evicted`;
  const versions = rows("pool").filter(([name]) => name.startsWith("version.")).map(([name, bytes]) => [name.slice(8), mebibytes(bytes)]);
  fill("pool-versions", ["<weights version", "KV"], versions);
  const counts = rows("pool").filter(([name]) => name.startsWith("count.")).map(([name, n]) => [name.slice(6), n]);
  const total = counts.reduce((sum, [, n]) => sum + n, 0);
  const lines = counts.filter(([, n]) => n).sort(([, one], [, other]) => other - one).map(([name, n]) => {
    const dot = name.indexOf("."), cause = dot < 0 ? "" : name.slice(dot + 1).replaceAll("_", " ");
    const kind = cause === "new" ? "computed first" : SOURCES[dot < 0 ? name : name.slice(0, dot)] || name;
    return [kind, cause === "new" ? "" : cause, count(n), percent(n, total)];
  });
  fill("pool-sources", ["<KV of contexts", "<cause", "tokens", "share"], lines);
}

function show_acceptance() {
  const all = state.acceptance || {}, drafted = all.drafted || {}, accepted = all.accepted || {};
  const lines = Object.entries(drafted).map(([source, n]) => [source, count(n), count(accepted[source] || 0), percent(accepted[source] || 0, n)]);
  fill("sources", ["<source", "drafted", "accepted", "share"], lines.length ? lines : [["no drafts yet", "–", "–", "–"]]);
  const positions = (all.positions || []).map((n) => n / Math.max(1, all.verifications)), highest = Math.max(0.01, ...positions);
  byId("positions-said").textContent = positions.length ? `accepted at position 1 to ${positions.length}; the highest bar is ${percent(highest, 1)} of verifications` : "";
  byId("positions").setAttribute("aria-label", positions.map((share, place) => `${place + 1}: ${percent(share, 1)}`).join(", ") || "none");
  byId("positions").replaceChildren(...positions.map((share, place) => element("i", { title: `position ${place + 1}: ${percent(share, 1)}`, style: { height: (100 * share) / highest + "%" } })));
}

function show_faults() {
  const lines = rows("contained").sort(([, one], [, other]) => other - one).map(([name, n]) => [name, count(n)]);
  const aside = rows("replicas").filter(([, one]) => one.aside).map(([name, one]) => [`${name} is set aside`, one.aside]);
  fill("contained", ["<contained errors", "<count"], [...aside, ...lines]);
  const faults = rows("faults").sort(([a], [b]) => b - a);
  fill_lines("faults", faults.length ? faults.map(([, one]) => [one.at_s, `${[one.sample && short(one.sample), one.replica].filter(Boolean).join(" on ")}: ${one.text}`]) : []);
  if (!faults.length && !lines.length && !aside.length) byId("faults").replaceChildren(element("li", {}, "none"));
}
function show_news() {
  if (!rows("news").length) return byId("news").replaceChildren(element("li", {}, "none since this board began"));
  fill_lines("news", rows("news").sort(([a], [b]) => b - a).map(([, one]) => [one.at_s, one.text]));
}

const SHOWN = [ // each with the sections that it is made of
  [show_header, ["service", "replicas", "pool", "moments"]], [show_batches, ["batches", "service"]], [show_replicas, ["replicas", "samples"]],
  [show_longest, ["samples"]], [show_waiting, ["waiting"]], [show_wanted, ["service", "replicas"]], [show_weights, ["service", "replicas"]],
  [show_pool, ["pool"]], [show_acceptance, ["acceptance"]], [show_faults, ["faults", "contained", "replicas"]], [show_news, ["news"]],
  [draw, ["moments"]],
];
function show(sections) {
  note_marks();
  for (const [one, of] of SHOWN) if (of.some((name) => name in sections)) one();
}
