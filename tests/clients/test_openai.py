#!/usr/bin/env python3
"""The unmodified OpenAI SDK against a router.

CAIRN_ROUTER_URL names the router, such as http://127.0.0.1:8080; run with the Python that tests/clients/setup.sh made.
"""

import asyncio
import json
import os
import sys
import unittest
import urllib.error
import urllib.request

import openai

URL = os.environ.get("CAIRN_ROUTER_URL", "").rstrip("/")
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
QUESTION = [{"role": "user", "content": "What is a cairn? Grüße, 你好 🙂"}]


def client(**more):
    return openai.OpenAI(base_url=URL + "/v1", api_key="unused", max_retries=0, timeout=120, **more)


def raw(path, body, headers=None):
    """Status and parsed body of a request that no SDK would send."""
    request = urllib.request.Request(URL + path, data=body, headers={"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


class Router(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = client()
        cls.model = cls.client.models.list().data[0].id

    def chat(self, **more):
        return self.client.chat.completions.create(**({"model": self.model, "messages": QUESTION, "max_tokens": 12} | more))

    def test_models_are_listed_and_one_can_be_asked_for(self):
        models = self.client.models.list().data
        self.assertTrue(models and all(model.object == "model" for model in models))

    def test_a_chat_answers_whole(self):
        answer = self.chat()
        self.assertEqual(answer.object, "chat.completion")
        self.assertEqual(answer.choices[0].message.role, "assistant")
        self.assertTrue(answer.choices[0].finish_reason in ("stop", "length"))
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
        self.assertGreater(answer.usage.prompt_tokens, 5)

    def test_a_chat_streams_and_the_pieces_make_the_whole_answer(self):
        whole = self.chat(temperature=0, seed=1)
        pieces = list(self.chat(temperature=0, seed=1, stream=True))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertTrue(any(piece.choices and piece.choices[0].finish_reason for piece in pieces))
        self.assertTrue(all(piece.usage is None for piece in pieces), "usage came without being asked for")
        self.assertTrue(all(piece.choices for piece in pieces), "a chunk without choices came without being asked for")

    def test_usage_comes_last_in_a_stream_where_asked_for(self):
        pieces = list(self.chat(stream=True, stream_options={"include_usage": True}))
        self.assertEqual(pieces[-1].choices, [])
        self.assertGreater(pieces[-1].usage.prompt_tokens, 5)

    def test_completions_answer_whole_and_streamed_for_text_and_token_ids(self):
        for prompt in ("Once upon a time", [300, 301, 302, 303]):
            asked = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "seed": 1}
            whole = self.client.completions.create(**asked)
            self.assertEqual(whole.object, "text_completion")
            streamed = "".join(piece.choices[0].text for piece in self.client.completions.create(**asked, stream=True) if piece.choices)
            self.assertEqual(streamed, whole.choices[0].text)

    def test_a_list_of_prompts_is_one_request_with_a_choice_each(self):
        answer = self.client.completions.create(model=self.model, prompt=["one", "two", "three"], max_tokens=2)
        self.assertEqual([choice.index for choice in answer.choices], [0, 1, 2])

    def test_tools_pass_through(self):
        without = self.chat(max_tokens=1).usage.prompt_tokens
        with_tools = self.chat(max_tokens=1, tools=TOOLS, tool_choice="none").usage.prompt_tokens
        self.assertGreater(with_tools, without + 10, "the tools did not reach the engine's template")
        call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\": \"Zürich\"}"}}
        history = QUESTION + [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]
        self.assertGreater(self.chat(messages=history, max_tokens=1).usage.prompt_tokens, without + 10)

    def test_unknown_fields_pass_through(self):
        answer = self.chat(extra_body={"min_tokens": 5, "ignore_eos": True}, max_tokens=5)
        self.assertEqual(answer.usage.completion_tokens, 5)

    def test_n_is_passed_on_as_sent(self):
        try:
            self.assertEqual(len(self.chat(n=2, temperature=1).choices), 2)
        except openai.BadRequestError as error:
            self.assertIn("n", error.message)

    def test_content_parts_count_as_the_same_prompt(self):
        parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
        self.assertEqual(self.chat(messages=parts).usage.prompt_tokens, self.chat().usage.prompt_tokens)

    def test_a_long_start_is_cached_the_second_time(self):
        rules = "Rule: be kind, be brief, cite a source. " * 420  # over 4,000 tokens
        used = [self.chat(messages=[{"role": "system", "content": rules}, {"role": "user", "content": text}], max_tokens=2).usage
                for text in ("first question", "second question", "third question")]
        self.assertGreater(used[0].prompt_tokens, 4_000)
        cached = [(u.prompt_tokens_details.cached_tokens if u.prompt_tokens_details else 0) or 0 for u in used]
        self.assertGreater(max(cached[1:]), 3_500, f"cached tokens were {cached}; does the engine report them (--enable-prompt-tokens-details)?")

    def test_an_unknown_model_is_404_with_an_error_body(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.chat(model="no-such-model")
        self.assertIn("no-such-model", caught.exception.message)
        self.assertIsNotNone(caught.exception.type)

    def test_a_bad_request_is_400_with_an_error_body(self):
        for messages in ([], [{"role": "user", "content": 5}], [{"content": "no role"}]):
            with self.assertRaises(openai.BadRequestError) as caught:
                self.chat(messages=messages)
            self.assertTrue(caught.exception.message)

    def test_a_prompt_beyond_the_model_is_400_whole_and_streamed(self):
        long = [{"role": "user", "content": "word " * 200_000}]
        for stream in (False, True):
            with self.assertRaises(openai.BadRequestError) as caught:
                answer = self.chat(messages=long, stream=stream)
                list(answer if stream else [])
            self.assertRegex(caught.exception.message, r"\d{3,}")

    def test_bodies_that_no_sdk_sends_are_400_every_time(self):
        bodies = [
            b"{", b"[]", b"null", b'{"model": "x"', b'{"model": ' + json.dumps(self.model).encode() + b', "messages": [{"role": "user", "content": "\xff\xfe"}]}',
            b'{"model": ' + json.dumps(self.model).encode() + b', "messages": [{"role": "user", "content": "\\ud83e"}]}']
        for body in bodies:
            for _ in range(2):
                status, answer = raw("/v1/chat/completions", body)
                self.assertEqual(status, 400, body)
                self.assertTrue(answer["error"]["message"], body)

    def test_a_stream_may_be_left_early(self):
        for _ in range(5):
            with self.chat(stream=True, max_tokens=200, extra_body={"ignore_eos": True}) as stream:
                next(iter(stream))
        self.assertTrue(self.chat().choices)

    def test_many_requests_at_once_all_answer(self):
        async def everything():
            async with openai.AsyncOpenAI(base_url=URL + "/v1", api_key="unused", max_retries=0, timeout=120) as many:
                asked = [many.chat.completions.create(model=self.model, messages=QUESTION, max_tokens=4) for _ in range(32)]
                return await asyncio.gather(*asked)

        self.assertEqual(len(asyncio.run(everything())), 32)


if __name__ == "__main__":
    if not URL:
        print("SKIPPED: test_openai.py: set CAIRN_ROUTER_URL to a running router", file=sys.stderr)
        sys.exit(0)
    unittest.main(verbosity=2)
