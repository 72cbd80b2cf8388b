// OpenAI's own client of Node.js, used as its documentation says: only the base URL and the key are ours.
import OpenAI from "openai";

const [baseURL, apiKey, model, content] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content }], temperature: 0, max_tokens: 12 };

const whole = await client.chat.completions.create(asked);

let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const completion = await client.completions.create({ model, prompt: content, temperature: 0, max_tokens: 12 });

const models = [];
for await (const each of client.models.list()) models.push(each.id);

let refused = null;
try {
  await new OpenAI({ baseURL, apiKey: "sk-unknown", maxRetries: 0 }).chat.completions.create(asked);
} catch (error) {
  refused = { kind: error.constructor.name, status: error.status, code: error.code };
}

console.log(
  JSON.stringify({
    text: whole.choices[0].message.content,
    finish_reason: whole.choices[0].finish_reason,
    usage: whole.usage,
    streamed,
    streamed_usage: usage,
    completion: completion.choices[0].text,
    models,
    refused,
  }),
);
