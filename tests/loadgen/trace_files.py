"""Small traces in the published form of each of their kinds. The figures are made up."""

import json
from pathlib import Path

BURST_SIX = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_EIGHT = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
CHATS = [
    {"id": "a", "conversations": [{"from": "human", "value": "what is a token"}, {"from": "gpt", "value": "a piece"}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "hi"}]},
    {"id": "c", "conversations": [{"from": "human", "value": "alone"}]},
]


def bailian(chat: int, parent: int, at_s: float, length: int, ids: list[int], turn: int) -> str:
    return json.dumps({"chat_id": chat, "parent_chat_id": parent, "timestamp": at_s, "input_length": length,
                       "output_length": 9, "type": "text", "turn": turn, "hash_ids": ids})  # fmt: skip


TEXTS = {
    "azure2023.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n",
    "azure2024.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,374,44\n"
    "2024-05-10 00:00:04+00:00,396,109\n",
    "burst6.csv": f"{BURST_SIX}\n5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n"
    "118,GPT-4,417,276,693,Conversation log\n",
    "burst8.csv": f"{BURST_EIGHT}\n5,s1,2.5,ChatGPT,472,18,490,Conversation log\n"
    "45,s1,1.5,GPT-4,1087,230,1317,Conversation log\n",
    "mooncake.jsonl": '{"timestamp": 3000, "input_length": 513, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 6000, "input_length": 1024, "output_length": 7, "hash_ids": [0, 2]}\n',
    "bailian.jsonl": "\n".join(
        [bailian(1, -1, 0.5, 20, [7], 1), bailian(2, 1, 1.25, 50, [7, 8, 9, 10], 2), bailian(3, 2, 9.0, 64, [], 3)]
    ),
    "sharegpt.json": json.dumps(CHATS),
    "plain.jsonl": '{"at_s": 2, "prompt_tokens": 12, "output_tokens": 3, "klass": "a"}\n\n'
    '{"at_s": 1, "prompt": "one two three", "session_id": "s"}\n'
    '{"at_s": 4.5, "messages": [{"role": "user", "content": "hello there"}], "output_tokens": 2}\n',
}


def write(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(TEXTS[name], encoding="utf-8", newline="")
    return path


def write_servegen(folder: Path, family: str = "Gamma", cv: float = 2.0, rate: float = 20.0) -> Path:
    """Two windows of one client, silent in the second one, and a second client that never speaks."""
    folder.mkdir()
    lengths = {"input_tokens": "{100: 0.25, 200: 0.75}", "output_tokens": "{10: 1.0}"}
    (folder / "chunk-0-trace.csv").write_text(f"0,{rate},{cv},{family},1,1\n600,0,0,,,\n1200,{rate},0,{family},1,1\n")
    (folder / "chunk-0-dataset.json").write_text(json.dumps({"0": lengths, "1200": lengths}))
    (folder / "chunk-1-trace.csv").write_text("0,5,1,Gamma,1,1\n")
    (folder / "chunk-1-dataset.json").write_text(json.dumps({"0": {"input_tokens": "{}", "output_tokens": "{}"}}))
    return folder
