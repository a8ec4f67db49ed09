// Embeds sentences by transformers.js: node embed.mjs MODELS_FOLDER NAME
import { env, pipeline } from "@huggingface/transformers";
import takeTurns from "./turns.cjs";

const [folder, name] = process.argv.slice(2);
env.localModelPath = folder;
env.allowRemoteModels = false;
const embed = await pipeline("feature-extraction", name, {
  dtype: "fp32",
  session_options: { intraOpNumThreads: 1 },
});
const sentences = ["w1 w2 w3 w4 w5 w6 w7 w8 w9", "w9 w8 w7 w6 w5 w4 w3 w2 w1"];
await takeTurns(async () => Array.from((await embed(sentences, { pooling: "mean", normalize: true })).data));
