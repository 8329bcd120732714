"""The openai package against `heddle serve`: answers, streams, tools, several choices, errors, many clients at once.

    HEDDLE=build/cpu/src/cli/heddle python -m pytest tests/interop/serve/test_openai.py
"""
import asyncio
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from serve.serving import HEDDLE, NAME
from serve.test_hostile import Caller

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}]


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def chat(client, **settings):
    return client.chat.completions.create(**{"model": NAME, "messages": HELLO, "max_tokens": 8, "seed": 1, **settings})


def test_lists_the_base_model(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_a_stream_says_what_the_whole_answer_says(client):
    whole = chat(client, logprobs=True)
    choice = whole.choices[0]
    assert choice.finish_reason == "length" and len(choice.logprobs.content) == 8
    assert whole.usage.completion_tokens == 8 and whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 3  # tokens come as they are drawn
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    usage = chunks[-1].usage
    counts = [(each.prompt_tokens, each.completion_tokens, each.total_tokens) for each in (usage, whole.usage)]
    assert counts[0] == counts[1] and not chunks[-1].choices
    # The prompt's state was kept from the first time.
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens

def test_a_checkpoint_is_a_model(server, client):
    caller = Caller(server)
    session = caller.session()
    run = caller.run(session)
    prompt = [5, 17, 300, 12]
    for seq in range(1, 21, 2):
        caller.outcome("forward_backward", {"model_id": run, "seq_id": seq, "forward_backward_input": {"loss_fn": "cross_entropy", "data": [{
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "loss_fn_inputs": {"target_tokens": {"data": prompt[1:] + [77], "dtype": "int64"}}}]}})
        caller.outcome("optim_step", {"model_id": run, "seq_id": seq + 1, "adam_params": {"learning_rate": 3e-3}})
    path = caller.outcome("save_weights_for_sampler", {"model_id": run, "seq_id": 21, "path": "shown"})["path"]
    settings = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "extra_body": {"return_token_ids": True}}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: client.completions.create(model=path, **settings), range(4)))
    sampled = caller.outcome("asample", {"model_path": path, "num_samples": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
                                         "sampling_params": {"max_tokens": 6, "temperature": 0, "stop": []}})
    assert {tuple(answer.choices[0].token_ids) for answer in answers} == {tuple(sampled["sequences"][0]["tokens"])}
    assert answers[0].model == path
    assert answers[0].choices[0].token_ids[0] == 77
    assert client.completions.create(model=NAME, **settings).choices[0].token_ids != answers[0].choices[0].token_ids
    chunks = list(chat(client, model=path, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.NotFoundError) as refused:
        chat(client, model=path + "x")
    assert refused.value.code == "model_not_found" and refused.value.param == "model" and "is not known" in str(refused.value)
    others = httpx.post(server.url + "/tokenize", json={"model": "gpt-9", "prompt": "x"})
    assert others.status_code == 404


def test_token_ids_in_and_out_say_what_the_completion_says(server, client):
    prompt = [5, 17, 300, 12]
    text = client.completions.create(model=NAME, prompt=prompt, max_tokens=6, seed=3, extra_body={"return_token_ids": True})
    answer = httpx.post(server.url + "/inference/v1/generate", json={
        "model": NAME, "token_ids": prompt, "priority": 1, "sampling_params": {"max_tokens": 6, "seed": 3, "logprobs": 1}}).json()
    choice = answer["choices"][0]
    assert choice["token_ids"] == text.choices[0].token_ids and len(choice["logprobs"]["content"]) == 6
    assert choice["weight_versions"] == [0] * 6
    metrics = httpx.get(server.url + "/metrics").text
    assert 'vllm:lora_requests_info{max_lora="8",running_lora_adapters="",waiting_lora_adapters=""}' in metrics
    assert "vllm:request_queue_time_seconds_count" in metrics and "vllm:request_prefill_time_seconds_count" in metrics


def test_the_same_seed_gives_the_same_answer_alone_and_among_others(server, client):
    alone = chat(client, seed=5, temperature=2).choices[0].message.content

    async def many():
        other = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        asks = [other.chat.completions.create(model=NAME, messages=HELLO, max_tokens=8, seed=seed, temperature=2) for seed in range(12)]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*asks)]

    answers = asyncio.run(many())
    assert answers[5] == alone and len(set(answers)) > 2


def test_completions_of_several_prompts(client):
    answer = client.completions.create(model=NAME, prompt=["one", "two"], n=2, max_tokens=5, seed=3, logprobs=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.token_logprobs) == 5 for choice in answer.choices)
    ids = client.completions.create(model=NAME, prompt=[5, 6, 7], max_tokens=2, echo=True, extra_body={"return_token_ids": True})
    assert ids.choices[0].prompt_token_ids == [5, 6, 7] if hasattr(ids.choices[0], "prompt_token_ids") else ids.prompt_token_ids == [5, 6, 7]


def test_takes_tools_and_their_choice(client):
    assert chat(client, tools=TOOLS).choices[0].finish_reason in ("length", "tool_calls")
    begun = chat(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "add"}})
    assert begun.choices[0].finish_reason in ("length", "tool_calls")


@pytest.mark.parametrize("settings, status, field", [
    ({"model": "nobody"}, 404, "model"),
    ({"extra_body": {"frobnicate": 1}}, 400, "frobnicate"),
    ({"max_tokens": 10**6}, 400, "max_tokens"),
    ({"messages": []}, 400, "messages"),
    ({"n": 0}, 400, "n"),
    ({"temperature": -1}, 400, "temperature"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "gone"}}}, 400, "tool_choice.function.name"),
])
def test_errors_name_the_field(client, settings, status, field):
    with pytest.raises(openai.APIStatusError) as caught:
        chat(client, **settings)
    assert caught.value.status_code == status and caught.value.body["param"] == field


def test_an_adapter_has_a_name_of_its_own(model, tmp_path):
    done = subprocess.run([HEDDLE, "serve", str(model), "--name", "small", "--port", "0", "--data-dir", str(tmp_path), "--adapter",
                           "small=/nowhere", "device.name=cpu"], capture_output=True, text=True)
    assert done.returncode == 2 and "the model, or another adapter, has this name" in done.stderr, done.stderr


def test_health_tokens_and_metrics(server, client):
    chat(client)
    assert httpx.get(server.url + "/health").status_code == 200
    tokens = httpx.post(server.url + "/tokenize", json={"prompt": "hello"}).json()["tokens"]
    assert httpx.post(server.url + "/detokenize", json={"tokens": tokens}).json()["prompt"] == "hello"
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    generated = [line for line in lines if line.startswith("vllm:generation_tokens_total")]
    assert generated and float(generated[0].rsplit(" ", 1)[1]) == 8
    assert all(line.startswith("#") or len(line.rsplit(" ", 1)) == 2 for line in lines)


def test_heddle_chat_is_answered_as_from_the_directory(server, model):
    def chat(target, *more):
        return subprocess.run([HEDDLE, "chat", str(target), "--temperature", "0", "--max-new-tokens", "8", *more], capture_output=True,
                              input="the river\nthe hill\n", text=True)
    remote = chat(server.url)
    assert remote.returncode == 0 and remote.stdout == chat(model).stdout and remote.stdout, remote.stderr
    assert "'nope' does not exist" in chat(server.url, "--model", "nope").stderr
    assert "--dtype is for a model directory" in chat(server.url, "--dtype", "float32").stderr
    nobody = chat("http://127.0.0.1:9")
    assert nobody.returncode == 1 and "http://127.0.0.1:9/v1/models" in nobody.stderr
