// Embeds sentences by transformers.js: node embed.mjs MODELS_FOLDER NAME SECONDS
import { env, pipeline } from "@huggingface/transformers";

const [folder, name, seconds] = process.argv.slice(2);
env.localModelPath = folder;
env.allowRemoteModels = false;
const embed = await pipeline("feature-extraction", name, {
  dtype: "fp32",
  session_options: { intraOpNumThreads: 1 },
});
const sentences = ["w1 w2 w3 w4 w5 w6 w7 w8 w9", "w9 w8 w7 w6 w5 w4 w3 w2 w1"];
const times = [];
let answer;
for (const end = Date.now() + 1000 * Number(seconds); Date.now() < end; ) {
  const begun = performance.now();
  answer = await embed(sentences, { pooling: "mean", normalize: true });
  times.push(performance.now() - begun);
}
console.log(JSON.stringify({ answer: Array.from(answer.data), times }));
