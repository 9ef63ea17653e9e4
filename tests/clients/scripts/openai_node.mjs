// The openai package for Node: both interfaces, streamed and whole, and its own error types.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { API_KEY, HAS_KEYS, MESSAGES, MODEL, PROMPTS, V1, cancels, main, rejects } from "./checks.mjs";

const client = new OpenAI({ baseURL: V1, apiKey: API_KEY, maxRetries: 0 });
const greedy = { model: MODEL, temperature: 0, max_tokens: 8 };
const chat = (more = {}) => client.chat.completions.create({ messages: MESSAGES, ...greedy, ...more });
const complete = (more = {}) => client.completions.create({ prompt: PROMPTS[0], ...greedy, ...more });

async function all(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

await main({
  "models are listed, and found by name": async () => {
    assert.deepEqual((await all(client.models.list())).map((m) => m.id), [MODEL]);
    assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
    await rejects(OpenAI.NotFoundError, () => client.models.retrieve("another"));
  },
  "a streamed chat is the whole one in pieces, with the usage at its end": async () => {
    const whole = await chat();
    assert.match(whole.choices[0].message.content, /Paris/);
    const chunks = await all(await chat({ stream: true, stream_options: { include_usage: true } }));
    assert.equal(chunks[0].choices[0].delta.role, "assistant");
    const text = chunks.map((c) => c.choices[0]?.delta.content ?? "").join("");
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(chunks.at(-1).choices, []);
    assert.equal(chunks.at(-1).usage.total_tokens, whole.usage.total_tokens);
    assert.equal(chunks.at(-2).choices[0].finish_reason, whole.choices[0].finish_reason);
  },
  "the SDK's own stream helper gathers the whole answer": async () => {
    const stream = client.chat.completions.stream({ messages: MESSAGES, ...greedy });
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.content, text);
    assert.match(text, /Paris/);
  },
  "several prompts give each its own answer, whole and streamed": async () => {
    const texts = [];
    for (const prompt of PROMPTS) texts.push((await complete({ prompt })).choices[0].text);
    const together = await complete({ prompt: PROMPTS });
    assert.deepEqual(together.choices.map((c) => c.text), texts);
    const streamed = PROMPTS.map(() => "");
    for await (const chunk of await complete({ prompt: PROMPTS, stream: true }))
      for (const choice of chunk.choices) streamed[choice.index] += choice.text;
    assert.deepEqual(streamed, texts);
    assert.equal((await complete({ prompt: [504, 3575, 282] })).usage.prompt_tokens, 3);
  },
  "several samples are choices of one answer, whole and streamed": async () => {
    const asked = { n: 3, seed: 5, temperature: 1.5 };
    const texts = (await chat(asked)).choices.map((c) => c.message.content);
    assert.equal(texts.length, 3);
    const streamed = texts.map(() => "");
    for await (const chunk of await chat({ ...asked, stream: true }))
      for (const choice of chunk.choices) streamed[choice.index] += choice.delta.content ?? "";
    assert.deepEqual(streamed, texts);
  },
  "a stop string ends the answer before it": async () => {
    const whole = (await complete()).choices[0].text;
    const stop = whole.slice(2, 4);
    const cut = (await complete({ stop: [stop] })).choices[0];
    assert.equal(cut.text, whole.slice(0, whole.indexOf(stop)));
    assert.equal(cut.finish_reason, "stop");
  },
  "equal seeds draw equal tokens": async () => {
    const draw = async (seed) => (await complete({ seed, temperature: 1.5 })).choices[0].text;
    assert.equal(await draw(7), await draw(7));
  },
  "log probabilities of chats and completions, and echo": async () => {
    const { content } = (await chat({ logprobs: true, top_logprobs: 2 })).choices[0].logprobs;
    assert.equal(content.length, (await chat()).usage.completion_tokens);
    for (const entry of content) assert.equal(entry.top_logprobs.length, 2);
    const scored = (await complete({ echo: true, logprobs: 1, max_tokens: 1 })).choices[0];
    assert(scored.text.startsWith(PROMPTS[0]));
    assert.equal(scored.logprobs.token_logprobs[0], null);
    assert.equal(scored.logprobs.tokens.join(""), scored.text);
  },
  "errors are the SDK's own types and name the field": async () => {
    const error = await rejects(OpenAI.BadRequestError, () => chat({ temperature: -1 }));
    assert.equal(error.param, "temperature");
    assert.equal((await rejects(OpenAI.BadRequestError, () => chat({ n: 129, stream: true }))).param, "n");
    await rejects(OpenAI.NotFoundError, () => chat({ model: "another" }));
    await rejects(OpenAI.NotFoundError, () => client.embeddings.create({ model: MODEL, input: "x" }));
    if (HAS_KEYS) {
      const wrong = new OpenAI({ baseURL: V1, apiKey: "wrong", maxRetries: 0 });
      await rejects(OpenAI.AuthenticationError, () => wrong.models.list());
    }
  },
  "a stream that is left early is cancelled": () =>
    cancels(async () => {
      const stream = await chat({ stream: true, max_tokens: 2000, ignore_eos: true });
      let count = 0;
      for await (const _ of stream) if (++count === 3) break;
    }),
});
