// Queries over a trace, by Perfetto's own trace processor in its WebAssembly build.
//
//     node query.mjs FOLDER TRACE < QUERIES.json
//
// FOLDER holds trace_processor.wasm, its loader engine_bundle.node.js and the reader of its answers engine.mjs. QUERIES is
// a list of SQL texts; the answer is one JSON list a query, of rows as objects. Ends with status 1 and the processor's own
// words if it cannot read the trace, or a query is wrong.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';

const [folder, trace] = process.argv.slice(2).map((path) => resolve(path));
const queries = JSON.parse(readFileSync(0, 'utf8'));
const bytes = readFileSync(trace);
console.log = console.error; // stdout is for answers alone

// The loader is written for a worker of a browser, whose 64-bit build the folder does not hold.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = Object;
globalThis.location = { href: pathToFileURL(join(folder, 'engine.js')).href };
globalThis.XMLHttpRequest = class {
  open() {}
  send() {
    this.response = new Uint8Array(readFileSync(join(folder, 'trace_processor.wasm')));
  }
};
const { Module } = WebAssembly;
WebAssembly.Module = function (code) {
  if (code[8] === 5 && code[11] === 4) throw new Error('asks for memory of 64 bits');
  return new Module(code);
};
createRequire(import.meta.url)(join(folder, 'engine_bundle.node.js'));
const { EngineBase } = await import(pathToFileURL(join(folder, 'engine.mjs')));

class Engine extends EngineBase {
  id = 'query';
  mode = 'WASM';

  constructor() {
    super();
    const { port1, port2 } = new MessageChannel();
    self.onmessage({ data: port2 });
    this.port = port1;
    this.port.onmessage = ({ data }) => this.onRpcResponseBytes(data);
  }

  rpcSendRequestBytes(data) {
    this.port.postMessage(data);
  }
}

const plain = (value) => (typeof value === 'bigint' ? Number(value) : value);

async function rows(engine, sql) {
  const result = await engine.query(sql);
  const found = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    found.push(Object.fromEntries(result.columns().map((column) => [column, plain(row.get(column))])));
  }
  return found;
}

try {
  const engine = new Engine();
  await new Promise((ready) => setTimeout(ready, 0));
  await engine.parse(new Uint8Array(bytes));
  await engine.notifyEof();
  const answers = [];
  for (const sql of queries) answers.push(await rows(engine, sql));
  process.stdout.write(JSON.stringify(answers), () => process.exit(0));
} catch (error) {
  console.error(error.message ?? error);
  process.exit(1);
}
