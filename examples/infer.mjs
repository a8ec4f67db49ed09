// Runs a model of honed once from Node, on zeros: `npm install @msgpack/msgpack && node infer.mjs MODEL`.
//
// Speaks the protocol of the socket (docs/protocol.md) and has no client library.

import { createConnection } from "node:net";
import { decodeMultiStream, encode } from "@msgpack/msgpack";

const WIDTHS = { BOOL: 1, UINT8: 1, INT8: 1, FP16: 2, INT32: 4, FP32: 4, INT64: 8, FP64: 8 };

/** A connection to the service, on which any number of calls may wait for their answers. */
class Client {
  #socket;
  #waiting = new Map();
  #next = 0;

  constructor(path) {
    this.#socket = createConnection(path);
    this.#receive().catch((error) => this.#fail(error));
  }

  /** Resolves to the result of a method; rejects with the service's sentence, and its `code`. */
  call(method, parameters) {
    const id = this.#next++;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject });
      this.#socket.write(encode([0, id, method, [parameters]]));
    });
  }

  close() {
    this.#socket.end();
  }

  async #receive() {
    for await (const [kind, id, error, result] of decodeMultiStream(this.#socket)) {
      if (kind !== 1) continue; // a notification
      const { resolve, reject } = this.#waiting.get(id);
      this.#waiting.delete(id);
      if (error) reject(Object.assign(new Error(error.message), { code: error.code }));
      else resolve(result);
    }
    this.#fail(new Error("the service closed the connection"));
  }

  #fail(error) {
    for (const { reject } of this.#waiting.values()) reject(error);
    this.#waiting.clear();
  }
}

async function main(model) {
  const client = new Client(process.env.HONED_SOCKET ?? "/run/honed/honed.sock");
  try {
    const { inputs } = await client.call("ModelMetadata", { name: model });
    const elements = (shape) => shape.reduce((product, size) => product * size, 1);
    const answer = await client.call("ModelInfer", {
      model_name: model,
      inputs: inputs.map(({ name, datatype, shape }) => ({ name, datatype, shape })),
      raw_input_contents: inputs.map((x) => new Uint8Array(WIDTHS[x.datatype] * elements(x.shape))),
    });
    answer.outputs.forEach(({ name, datatype, shape }, index) => {
      const bytes = Uint8Array.from(answer.raw_output_contents[index]); // a copy, which begins at a multiple of 4
      const values = datatype === "FP32" ? [...new Float32Array(bytes.buffer).subarray(0, 4)].join(" ") : "";
      console.log(name, datatype, JSON.stringify(shape), values);
    });
  } finally {
    client.close();
  }
}

try {
  await main(process.argv[2]);
} catch (error) {
  console.error(`infer: ${error.code ?? "error"}: ${error.message}`);
  process.exit(1);
}
