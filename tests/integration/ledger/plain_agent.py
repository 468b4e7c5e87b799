"""An agent that knows a base URL and nothing of tokens: plain chat completions, two fields a message.

Run as ``python plain_agent.py BASE_URL QUESTION...``; asks the questions in turn, in one
conversation, and prints the answers as JSON.
"""

import json
import sys

import openai


def main() -> None:
    base_url, *questions = sys.argv[1:]
    messages: list = []
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer = client.chat.completions.create(
                model="policy", messages=messages, max_tokens=12, temperature=1.0, seed=3
            )
            content = answer.choices[0].message.content
            messages.append({"role": "assistant", "content": content})
    sys.stdout.write(json.dumps([message["content"] for message in messages[1::2]]))


if __name__ == "__main__":
    main()
