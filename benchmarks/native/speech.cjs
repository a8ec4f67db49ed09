// Cleans speech by sherpa-onnx: node speech.cjs MODEL SECONDS
const sherpa = require("sherpa-onnx-node");

const [model, seconds] = process.argv.slice(2);
const denoiser = new sherpa.OfflineSpeechDenoiser({ model: { gtcrn: { model }, numThreads: 1 } });
const samples = Float32Array.from({ length: 16000 }, (_, i) => 0.3 * Math.sin(i / 7) + 0.1 * Math.sin(i * i));
const times = [];
let answer;
for (const end = Date.now() + 1000 * Number(seconds); Date.now() < end; ) {
  const begun = performance.now();
  const cleaned = denoiser.run({ samples, sampleRate: 16000 });
  times.push(performance.now() - begun);
  answer = Array.from(cleaned.samples.slice(0, 1000));
}
console.log(JSON.stringify({ answer, times }));
