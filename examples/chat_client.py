# SPDX-License-Identifier: Apache-2.0
"""Ask a running server (`headrace serve demo`) with OpenAI's client: python examples/chat_client.py [URL] [QUESTION]"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
question = sys.argv[2] if len(sys.argv) > 2 else "Name three rivers in Europe."

client = OpenAI(base_url=url, api_key="none needed")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    max_completion_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} output tokens]")
