// One sample: its chunks, moves and reasons, and its text as far as chunks have ended.
let shown = null; // its id

async function open_sample(id) {
  shown = id;
  byId("sample-name").textContent = id;
  byId("text").textContent = byId("sample-said").textContent = byId("text-said").textContent = "";
  byId("chunks").replaceChildren();
  if (!byId("sample").open) byId("sample").showModal();
  await refresh_sample();
}
async function refresh_sample() {
  const id = shown, answer = await fetch("/board/sample?id=" + encodeURIComponent(id)).catch(() => null);
  if (id !== shown || answer === null) return;
  if (answer.status !== 200) {
    byId("sample-said").textContent = answer.status === 204 ? "it has ended, and is not known any more" : `the service does not answer (${answer.status})`;
    return;
  }
  const one = await answer.json();
  byId("sample-said").textContent = said_of(one);
  show_chunks(one);
  show_text(one);
}
function said_of(one) {
  const of = one.expected_tokens === null ? "" : ` of about ${count(one.expected_tokens)}, ${count(one.max_tokens)} at most`;
  const end = one.end ? `, ${one.end}` : "";
  return `${one.state}${end}: ${one.why}${one.error ? ` (${one.error})` : ""}; ${plural(one.tokens, "token")}${of}; ${plural(one.dropped + one.chunks.length, "chunk")}, ${plural(one.moves, "move")}`;
}
function show_chunks(one) {
  let place = null;
  const lines = one.chunks.map((chunk, number) => {
    const moved = chunk.copy_of === null && place !== null && place !== chunk.replica_id;
    if (chunk.copy_of === null) place = chunk.replica_id;
    const seconds = chunk.ended_s === null ? "" : (chunk.ended_s - chunk.began_s).toFixed(1);
    return [
      one.dropped + number + 1, element("span", {}, chunk.replica_id, moved ? badge("moved") : "", chunk.copy_of !== null ? badge("race", chunk.method || "") : ""),
      clock(chunk.began_s), seconds, count(chunk.start), chunk.ended_s === null ? "" : count(chunk.new_tokens), chunk.end || "runs",
      [chunk.reason, chunk.asked && `asked to stop: ${chunk.asked}`, chunk.error].filter(Boolean).join("; "),
    ];
  });
  fill("chunks", ["chunk", "<replica", "began", "seconds", "from", "tokens", "<end", "<reason"], lines);
}
function versions(segments) { // each with the position from which it made the answer
  const changes = segments.filter((part, place) => !place || segments[place - 1].weights_version !== part.weights_version);
  return changes.map((part) => `${part.weights_version} from ${count(part.start)}`);
}
function show_text(one) {
  const text = byId("text"), follows = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
  if (one.text === null || one.text === undefined) {
    byId("text-said").textContent = one.text_refused ? `its text is not for this token: ${one.text_refused}` : recorded ? "a journal has no texts" : "its text has gone with it";
    text.hidden = true;
    return;
  }
  text.hidden = false;
  byId("text-said").textContent = !one.segments.length ? "no chunk has ended yet" :
    `of ended chunks: ${count(one.drafted_tokens)} drafted tokens, ${count(one.accepted_tokens)} accepted; context computed ${count(one.computed_tokens)}, found ${count(one.cached_tokens)}; ` +
    "weights " + versions(one.segments).join(", ");
  text.textContent = (one.text_tokens >= 2000 && one.text_tokens < one.tokens ? "… " : "") + one.text;
  if (follows) text.scrollTop = text.scrollHeight;
}
byId("close").addEventListener("click", () => byId("sample").close());
byId("sample").addEventListener("close", () => { shown = null; });
