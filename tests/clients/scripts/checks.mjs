// What every script of an npm client shares; the twin of checks.py.
import assert from "node:assert/strict";

const env = process.env;
export const BASE_URL = env.CLIENTS_BASE_URL.replace(/\/$/, "");
export const V1 = `${BASE_URL}/v1`;
export const MODEL = env.CLIENTS_MODEL;
export const HAS_KEYS = Boolean(env.CLIENTS_API_KEY);
export const API_KEY = env.CLIENTS_API_KEY || "none";
export const MESSAGES = [{ role: "user", content: "What is the capital of France?" }];
export const PROMPTS = ["The capital of France is", "One, two, three, four,"];
const CANCEL_MS = 20_000;

// Runs each check, also after one that failed, and ends the process with the verdict.
export async function main(checks) {
  let failed = 0;
  for (const [name, run] of Object.entries(checks)) {
    const started = performance.now();
    try {
      await run();
      console.log(`ok ${name} (${((performance.now() - started) / 1000).toFixed(1)} s)`);
    } catch (error) {
      failed += 1;
      console.log(`FAILED ${name}: ${String(error).slice(0, 400).replaceAll("\n", " ")}`);
      console.error(error);
    }
  }
  process.exit(failed ? 1 : 0);
}

// The error of that class that the call throws.
export async function rejects(kind, call) {
  let caught;
  await assert.rejects(async () => call(), (error) => ((caught = error), error instanceof kind));
  return caught;
}

async function numCancelled() {
  const answer = await fetch(`${BASE_URL}/metrics`, { headers: { Authorization: `Bearer ${API_KEY}` } });
  const line = (await answer.text())
    .split("\n")
    .find((l) => l.startsWith("vllm:request_success_total") && l.includes('"abort"'));
  return Number(line.split(" ").at(-1));
}

// After `leave` has left a stream, the gateway must have cancelled its request.
export async function cancels(leave) {
  const before = await numCancelled();
  await leave();
  const deadline = Date.now() + CANCEL_MS;
  while ((await numCancelled()) <= before) {
    assert(Date.now() < deadline, "the request was not cancelled");
    await new Promise((resume) => setTimeout(resume, 100));
  }
}
