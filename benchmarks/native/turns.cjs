// What each program in JavaScript ends with: it is used once, and once more for each line of standard input.
const lines = require("readline").createInterface({ input: process.stdin });

module.exports = async function takeTurns(use) {
  const turn = async () => {
    const begun = performance.now();
    const found = await use();
    console.log(JSON.stringify({ found, ms: performance.now() - begun }));
  };
  await turn();
  for await (const _ of lines) await turn();
};
