// Runs a model on an image by onnxruntime-node: node image.cjs MODEL
const fs = require("fs");
const ort = require("onnxruntime-node");

(async () => {
  const bytes = fs.readFileSync(process.argv[2]);
  const session = await ort.InferenceSession.create(bytes, { intraOpNumThreads: 1 });
  const pixels = Float32Array.from({ length: 3 * 160 * 160 }, (_, i) => ((i * 7919) % 1000) / 1000);
  await require("./turns.cjs")(async () => {
    const { y } = await session.run({ x: new ort.Tensor("float32", pixels, [1, 3, 160, 160]) });
    return Array.from(y.data.slice(0, 1000));
  });
})();
