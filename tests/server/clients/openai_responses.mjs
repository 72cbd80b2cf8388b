// The Responses API in OpenAI's own client of Node.js, used as its documentation says.
import OpenAI from "openai";

const [baseURL, apiKey, model, input] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const asked = { model, temperature: 0, max_output_tokens: 12 };

const whole = await client.responses.create({ ...asked, input });

let streamed = "";
let end = null;
const kinds = new Set();
for await (const event of await client.responses.create({ ...asked, input, stream: true })) {
  kinds.add(event.type);
  if (event.type === "response.output_text.delta") streamed += event.delta;
  if (event.type === "response.incomplete") end = event.response;
}

const collected = await client.responses.stream({ ...asked, input }).finalResponse();
const continued = await client.responses.create({ ...asked, input: "And then?", previous_response_id: whole.id });
const stored = await client.responses.retrieve(whole.id);
await client.responses.delete(whole.id);

let refused = null;
try {
  await client.responses.retrieve(whole.id);
} catch (error) {
  refused = { kind: error.constructor.name, status: error.status, code: error.code };
}

console.log(
  JSON.stringify({
    text: whole.output_text,
    status: whole.status,
    usage: whole.usage,
    streamed,
    kinds: [...kinds],
    streamed_usage: end.usage,
    collected: collected.output[0].content[0].text,
    continued_usage: continued.usage,
    stored: stored.output_text,
    refused,
  }),
);
