// Vercel's AI SDK with its provider for servers that speak OpenAI's API.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [baseURL, apiKey, model, prompt] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "kvtier", baseURL, apiKey, includeUsage: true });
const asked = { model: provider(model), prompt, temperature: 0, maxOutputTokens: 12, maxRetries: 0 };

const whole = await generateText(asked);

const stream = streamText(asked);
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;

let refused = null;
try {
  const stranger = createOpenAICompatible({ name: "kvtier", baseURL, apiKey: "sk-unknown" });
  await generateText({ ...asked, model: stranger(model) });
} catch (error) {
  refused = { kind: error.name, status: error.statusCode };
}

console.log(
  JSON.stringify({
    text: whole.text,
    finish_reason: whole.finishReason,
    usage: whole.usage,
    streamed,
    streamed_usage: await stream.usage,
    streamed_finish_reason: await stream.finishReason,
    refused,
  }),
);
