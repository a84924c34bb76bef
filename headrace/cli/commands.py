# SPDX-License-Identifier: Apache-2.0
"""The commands of `headrace`, as data: what each takes and, by name, the function that carries it out.

Nothing here imports a command, so `--help` loads none.
"""

from headrace.cli.bench_commands import BENCH, BENCH_GROUPS
from headrace.cli.command import CONFIG, LOG_LEVEL, Command, Group, Option

SAMPLING = (
    Option("max_tokens", "most tokens in an answer (default: what max_seq_len leaves)", "int", metavar="N"),
    Option("temperature", "0 is greedy (default: the model's own)", "float", metavar="X"),
    Option("top_k", "draw from the k most probable tokens", "int", metavar="N"),
    Option("top_p", "draw from the most probable tokens that together reach this", "float", metavar="X"),
    Option("min_p", "draw from tokens with at least this share of the best one's probability", "float", metavar="X"),
    Option("seed", "fixes the random numbers", "int", metavar="N"),
    Option("repetition_penalty", "over 1 makes used tokens less likely", "float", metavar="X"),
    Option("presence_penalty", "taken from the logit of each used token", "float", metavar="X"),
    Option("frequency_penalty", "the same, for each time it was used", "float", metavar="X"),
    Option("stop", "text that ends an answer; may be repeated", "list"),
    Option("ignore_eos", "go on past the model's end tokens", "flag"),
)
SYSTEM = Option("system", "system message")

COMMANDS = (
    Command(
        "serve",
        "serve a model to OpenAI clients",
        "headrace.cli.serve:run",
        trees=("LlmArgs", "ServerConfig"),
        options=(CONFIG,),
        example="headrace serve demo --port 8000",
    ),
    Command(
        "generate",
        "answer one prompt, streamed to the terminal",
        "headrace.cli.generate:run",
        options=(
            Option("prompt", "the prompt; - reads standard input", short="-p"),
            SYSTEM,
            Option("raw", "continue the text as it is, without the model's chat template", "flag"),
            *SAMPLING,
            CONFIG,
            LOG_LEVEL,
        ),
        example='headrace generate demo --prompt "What is a headrace?"',
    ),
    Command(
        "chat",
        "talk to a model, or to any OpenAI server",
        "headrace.cli.chat:run",
        options=(
            Option("url", "talk to the OpenAI server at this address instead of loading a model", metavar="URL"),
            Option("model", "with --url: the model to ask for (default: the server's first)", metavar="NAME"),
            Option("api_key", "with --url: key to send (default: OPENAI_API_KEY of the environment)", metavar="KEY"),
            SYSTEM,
            *SAMPLING,
            CONFIG,
            LOG_LEVEL,
        ),
        model_is_optional=True,
        example="headrace chat demo",
    ),
    Command(
        "config",
        "print the resolved configuration and where each value came from",
        "headrace.cli.config:run",
        trees=("LlmArgs", "ServerConfig"),
        options=(CONFIG,),
        example="headrace config demo --max_batch_size 16",
    ),
    *BENCH,
)
GROUPS: tuple[Group, ...] = BENCH_GROUPS
