// Cleans speech by sherpa-onnx: node speech.cjs MODEL
const sherpa = require("sherpa-onnx-node");

const denoiser = new sherpa.OfflineSpeechDenoiser({ model: { gtcrn: { model: process.argv[2] }, numThreads: 1 } });
const samples = Float32Array.from({ length: 16000 }, (_, i) => 0.3 * Math.sin(i / 7) + 0.1 * Math.sin(i * i));
require("./turns.cjs")(() => Array.from(denoiser.run({ samples, sampleRate: 16000 }).samples.slice(0, 1000)));
