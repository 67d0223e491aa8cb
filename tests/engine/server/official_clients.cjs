// The official JavaScript clients against a running server. Prints one JSON object: what each of them got.
const { OpenAI } = require("openai");
const { Anthropic } = require("@anthropic-ai/sdk");

const [url, key, part] = process.argv.slice(2);
const model = "tiny-model";
const messages = [{ role: "user", content: "Return a list" }];
const nothing = { type: "object", properties: {}, additionalProperties: false };

async function openaiChat() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
  const asked = { model, messages, max_tokens: 16, temperature: 0 };
  const whole = await client.chat.completions.create(asked);
  const stream = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
  const final = await stream.finalChatCompletion();
  const tools = [{ type: "function", function: { name: "time", parameters: nothing } }];
  const allowed = { mode: "required", tools: [{ type: "function", function: { name: "time" } }] };
  const tool_choice = { type: "allowed_tools", allowed_tools: allowed };
  const called = await client.chat.completions.create({ ...asked, max_tokens: 60, tools, tool_choice });
  const response = await client.responses.create({ model, input: "Return a list", max_output_tokens: 16, temperature: 0 });
  return {
    whole: whole.choices[0].message.content, streamed: final.choices[0].message.content,
    tokens: [whole.usage.completion_tokens, final.usage.completion_tokens],
    called: called.choices[0].message.tool_calls[0].function.name, response: response.output_text,
  };
}

async function anthropicMessages() {
  const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
  const asked = { model, messages, max_tokens: 16, temperature: 0 };
  const whole = await client.messages.create(asked);
  const texts = [];
  const stream = client.messages.stream(asked).on("text", (text) => texts.push(text));
  const final = await stream.finalMessage();
  const tools = [{ name: "time", input_schema: nothing }];
  const used = await client.messages.stream({ ...asked, max_tokens: 60, tools, tool_choice: { type: "any" } }).finalMessage();
  const counted = await client.messages.countTokens({ model, messages });
  return {
    whole: whole.content[0].text, streamed: final.content[0].text, texts: texts.join(""),
    used: [used.content[0].type, used.content[0].name, used.stop_reason], counted: counted.input_tokens,
    given: whole.usage.input_tokens + whole.usage.cache_read_input_tokens,
  };
}

async function failures() {
  const found = {};
  const attempt = async (name, call) => {
    try { await call(); found[name] = "answered"; }
    catch (error) { found[name] = [error.constructor.name, error.status, error.code ?? error.type]; }
  };
  const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
  const anthropic = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
  await attempt("openai", () => openai.chat.completions.create({ model: "other", messages }));
  await attempt("anthropic", () => anthropic.messages.create({ model: "other", messages, max_tokens: 1 }));
  return found;
}

(async () => {
  const works = part === "failures" ? {} : { openai: await openaiChat(), anthropic: await anthropicMessages() };
  console.log(JSON.stringify({ ...works, failures: await failures() }));
})();
