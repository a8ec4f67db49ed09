// Runs a model on an image by onnxruntime-node: node image.cjs MODEL SECONDS
const fs = require("fs");
const ort = require("onnxruntime-node");

const [model, seconds] = process.argv.slice(2);
(async () => {
  const session = await ort.InferenceSession.create(fs.readFileSync(model), { intraOpNumThreads: 1 });
  const pixels = Float32Array.from({ length: 3 * 160 * 160 }, (_, i) => ((i * 7919) % 1000) / 1000);
  const times = [];
  let answer;
  for (const end = Date.now() + 1000 * Number(seconds); Date.now() < end; ) {
    const begun = performance.now();
    const { y } = await session.run({ x: new ort.Tensor("float32", pixels, [1, 3, 160, 160]) });
    times.push(performance.now() - begun);
    answer = Array.from(y.data.slice(0, 1000));
  }
  console.log(JSON.stringify({ answer, times }));
})();
