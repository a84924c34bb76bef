# SPDX-License-Identifier: Apache-2.0
"""Complete a few prompts, then answer a chat as it is written: python examples/offline.py [MODEL]"""

import sys

from headrace import LLM, SamplingParams

PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "def fibonacci(n):"]

with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo", max_seq_len=2048) as llm:
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

    chat = llm.tokenizer.render_chat([{"role": "user", "content": "Why is the sky blue? One sentence."}])
    for output in llm.generate_async(chat, SamplingParams(temperature=0.6, top_p=0.95, seed=1, max_tokens=64)):
        print(output.outputs[0].text_diff, end="", flush=True)
    print()
