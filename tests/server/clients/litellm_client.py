"""LiteLLM as its documentation says for servers that speak OpenAI's API; prints one JSON object.

It runs in an environment of its own, of which nothing else is known here.
"""

import json
import sys

import litellm

base_url, key, model, content = sys.argv[1:]
messages = [{"role": "user", "content": content}]
asked = {"model": f"openai/{model}", "api_base": base_url, "api_key": key, "temperature": 0, "max_tokens": 12}

whole = litellm.completion(messages=messages, **asked)
chunks = list(litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **asked))
text = litellm.text_completion(prompt=content, **{**asked, "model": f"text-completion-openai/{model}"})
refused = None
try:
    litellm.completion(messages=messages, **{**asked, "api_key": "sk-unknown"}, num_retries=0)
except litellm.AuthenticationError as error:
    refused = {"kind": type(error).__name__, "status": error.status_code}

print(
    json.dumps(
        {
            "text": whole.choices[0].message.content,
            "finish_reason": whole.choices[0].finish_reason,
            "usage": whole.usage.model_dump(),
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "streamed_usage": next(chunk.usage.model_dump() for chunk in chunks if getattr(chunk, "usage", None)),
            "completion": text.choices[0].text,
            "refused": refused,
        }
    )
)
