// The AI SDK with its provider for OpenAI-compatible servers.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";
import { API_KEY, HAS_KEYS, MESSAGES, MODEL, PROMPTS, V1, cancels, main, rejects } from "./checks.mjs";

const provider = (apiKey = API_KEY) =>
  createOpenAICompatible({ name: "quire", baseURL: V1, apiKey, includeUsage: true });
const quire = provider();
const greedy = { temperature: 0, maxOutputTokens: 8, maxRetries: 0 };
const chat = { model: quire.chatModel(MODEL), messages: MESSAGES, ...greedy };
const text = { model: quire.completionModel(MODEL), prompt: PROMPTS[0], ...greedy };

await main({
  "a chat has an answer, a reason and a usage": async () => {
    const got = await generateText(chat);
    assert.match(got.text, /Paris/);
    assert(["stop", "length"].includes(got.finishReason));
    assert.equal(got.usage.totalTokens, got.usage.inputTokens + got.usage.outputTokens);
  },
  "a streamed chat is the whole one in pieces, with the usage": async () => {
    const stream = streamText(chat);
    const pieces = [];
    for await (const piece of stream.textStream) pieces.push(piece);
    assert(pieces.length > 1);
    const whole = await generateText(chat);
    assert.equal(pieces.join(""), whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
    assert.equal(await stream.finishReason, whole.finishReason);
  },
  "a system prompt, a stop string and a seed are taken": async () => {
    const whole = (await generateText({ ...chat, system: "Be brief." })).text;
    const stop = whole.slice(2, 4);
    const cut = await generateText({ ...chat, system: "Be brief.", stopSequences: [stop] });
    assert.equal(cut.text, whole.slice(0, whole.indexOf(stop)));
    assert.equal(cut.finishReason, "stop");
    const draw = async () => (await generateText({ ...chat, temperature: 1.5, seed: 7 })).text;
    assert.equal(await draw(), await draw());
  },
  "completions run whole and streamed": async () => {
    const whole = await generateText(text);
    let streamed = "";
    for await (const piece of streamText(text).textStream) streamed += piece;
    assert.equal(streamed, whole.text);
  },
  "errors are the SDK's own type and carry the status": async () => {
    const wrong = await rejects(APICallError, () => generateText({ ...chat, temperature: -1 }));
    assert.equal(wrong.statusCode, 400);
    assert.match(wrong.message, /temperature/);
    const missing = { ...chat, model: quire.chatModel("another") };
    assert.equal((await rejects(APICallError, () => generateText(missing))).statusCode, 404);
    if (HAS_KEYS) {
      const stranger = { ...chat, model: provider("wrong").chatModel(MODEL) };
      assert.equal((await rejects(APICallError, () => generateText(stranger))).statusCode, 401);
    }
  },
  "a stream that is left early is cancelled": () =>
    cancels(async () => {
      const leaving = new AbortController();
      const stream = streamText({
        ...chat,
        maxOutputTokens: 2000,
        abortSignal: leaving.signal,
        providerOptions: { quire: { ignore_eos: true } },
      });
      let count = 0;
      for await (const _ of stream.textStream) if (++count === 3) leaving.abort();
    }),
});
