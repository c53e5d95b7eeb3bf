"""Train the MTP draft head on the target's own answers: ``specfsm train-draft``.

No data set is needed. Prompts come from templates filled with words, and from the target itself, which is asked to
write the user's turn. The target answers them (mostly greedily), and the head learns the target's distributions over
these answers, unrolled: step k starts from the state that step k - 1 made, with the keys that it left, just as the
decode loop will run it. Held-out prompts have other templates and other words.

With ``--steps`` and ``--prompts`` the result is a function of the seed (on one device); ``--minutes`` bounds the run
by the clock, and then how far it gets depends on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from specfsm.decode.head import MTPHead
from specfsm.decode.weights import load_target

if TYPE_CHECKING:
    from rich.progress import Progress

# --------------------------------------------------------------------------------------------------------- prompts

WORDS: dict[str, tuple[str, ...]] = {
    name: tuple(" ".join(word.split()) for word in words.split("/"))
    for name, words in {
        "topic": """
            photosynthesis / gravity / the water cycle / volcanoes / democracy / inflation / black holes / vaccines /
            the Roman Empire / electricity / climate change / evolution / the human heart / magnetism / the French
            Revolution / recycling / the solar system / bacteria / friction / supply and demand / earthquakes / the
            Industrial Revolution / sleep / the internet / nuclear energy / the immune system / tides / hurricanes /
            genetics / ancient Egypt / the Renaissance / fossils / atoms / plate tectonics / the printing press /
            digestion / rainbows / wind power / the Cold War / stars / budgeting / encryption / machine learning /
            ocean currents / the greenhouse effect / muscles / the moon landing / the Silk Road / coral reefs /
            insurance / solar panels / batteries / glaciers / the nervous system / steam engines / migration of birds
            / the stock market / deserts / lightning / the Great Wall of China / rivers / trade unions / radio waves /
            chess / the alphabet / antibiotics / erosion / the calendar / human rights / the speed of light /
            photography / bridges / taxes / the metric system / compost / the Olympic Games / forests / memory / the
            water supply
        """,
        "thing": """
            a bicycle / a garden / a small business / a birthday party / a backpack / a blog / a kitchen / a resume /
            a website / a campfire / a job interview / a road trip / a study plan / a vegetable soup / a bookshelf /
            an aquarium / a podcast / a savings plan / a wedding / a school project / a bird house / a garage sale / a
            salad / a home office / a book club / a photo album / a picnic / a playlist / a science fair / a puppy / a
            loaf of bread / a first apartment / a morning routine / a town meeting / a marathon / a short film / a
            chess club / a family tree / a treehouse / a rain barrel / a piano recital / a food truck / a compost heap
            / a tent
        """,
        "animal": """
            a fox / a dolphin / an owl / a penguin / a tiger / a small dog / a turtle / an elephant / a rabbit / a
            crow / a bear / a horse / a whale / a squirrel / a cat / a frog / a bee / a parrot / a wolf / a hedgehog /
            a lizard / a goose / a donkey / a spider / an octopus / a deer / a mouse / a camel
        """,
        "person": """
            a young sailor / a retired teacher / a lonely robot / a clever baker / a shy painter / a brave nurse / a
            tired detective / a curious child / an old king / a street musician / a forgetful wizard / a farmer / a
            space pilot / a librarian / a watchmaker / an inventor / a clumsy knight / a postman / a gardener / a
            young chef / a lost traveler / a night guard / a twin sister / a train driver / a shepherd / a beekeeper
        """,
        "place": """
            a quiet village / a distant planet / a busy market / an old castle / a snowy mountain / a small island / a
            dark forest / a big city / an empty school / a desert town / a lighthouse / a floating ship / a hidden
            valley / an abandoned factory / a seaside hotel / a library / a train station / a museum / an underground
            cave / a rooftop garden / a frozen lake / a harbor / a windmill / a circus tent
        """,
        "name": """
            Emma / David / Maria / Ahmed / Sofia / John / Priya / Lucas / Anna / Kenji / Olivia / Omar / Grace / Pedro
            / Nina / Samuel / Leila / Tom / Ingrid / Victor / Rosa / Daniel / Mei / Hugo / Clara / Ivan
        """,
        "food": """
            pancakes / tomato soup / fried rice / an apple pie / spaghetti / a fruit salad / lentil curry / tacos /
            banana bread / mashed potatoes / a vegetable stew / pizza dough / an omelette / chocolate cookies / hummus
            / grilled fish / pumpkin soup / a sandwich / roast chicken / oatmeal / noodles / cheesecake / a smoothie
        """,
        "city": """
            Paris / Tokyo / Cairo / New York / Rome / Mumbai / London / Sydney / Berlin / Mexico City / Istanbul /
            Toronto / Athens / Lisbon / Vienna / Nairobi / Buenos Aires / Seoul / Madrid / Prague / Dublin / Oslo
        """,
        "field": """
            biology / history / mathematics / music / economics / physics / art / geography / computer science /
            medicine / psychology / chemistry / law / astronomy / engineering / philosophy / literature / sports
        """,
        "routine": """
            reverses a string / checks if a number is prime / sorts a list of numbers / counts the vowels in a text /
            finds the largest number in a list / computes the factorial of a number / removes duplicates from a list /
            converts Celsius to Fahrenheit / checks if a word is a palindrome / merges two sorted lists / sums the
            digits of a number / returns the Fibonacci sequence / counts the words in a sentence / finds common
            elements of two lists / computes the average of a list / rolls two dice / reads a file line by line /
            finds the longest word / flattens a nested list / checks if a year is a leap year / swaps two variables /
            transposes a matrix / computes the area of a circle / builds a dictionary from two lists / finds the
            second smallest number / rotates a list by k places / counts how often each letter occurs / validates an
            email address
        """,
        "language": "Python / JavaScript / Java / C / C++ / Ruby / Go / PHP / Rust / TypeScript",
        "trait": """
            honest / patient / creative / organized / healthy / confident / productive / kind / calm / focused /
            thankful / fit / curious / independent / punctual / generous
        """,
        "event": """
            the meeting next Monday / a delayed delivery / a job application / a missed deadline / a holiday party / a
            broken laptop / a new project / an apartment for rent / a refund / a vacation request / a school visit / a
            lost package / a conference talk / a dinner invitation / a price increase / a training course
        """,
        "sentence": """
            The weather was bad so we stayed at home. / He don't know where the keys is. / The movie was very good and
            I liked it a lot. / Our company make many product for customer. / The food was cold and the service was
            slow. / I can not come to the party because I am sick. / The car is old but it still runs well. / She
            walked to the store and she bought some milk. / The results of the test were better than we expected. /
            They was late to the meeting yesterday. / Please send me the report as soon as you can. / The dog barked
            all night and nobody could sleep. / The new phone has a big screen and a good camera. / We need to finish
            this work before Friday. / The city is loud and crowded in the summer. / The lake were frozen in january.
        """,
        "number": "3 / 5 / 7 / 10 / 4 / 6 / 8 / 12",
    }.items()
}
"""What the templates' slots are filled with. The last quarter of each list is held out."""

TEMPLATES: dict[str, tuple[str, ...]] = {
    "question": (
        "What is {topic}?",
        "Why is {topic} important?",
        "Who discovered the most about {topic}?",
        "How does {topic} affect our daily life?",
        "When did people first learn about {topic}?",
        "What is the difference between {topic} and {topic}?",
        "What are the main causes and effects of {topic}?",
        "What is the capital of the country where {city} is, and what is it known for?",
        "Is it true that {animal} can learn from people? Why?",
        "I have a test about {topic} tomorrow. What should I know?",
        "What do experts in {field} say about {topic}?",
        "How has {topic} changed over time?",
        "Where can one see the effects of {topic}?",
        "What would happen without {topic}?",
    ),
    "list": (
        "List {number} facts about {topic}.",
        "Give me {number} tips for planning {thing}.",
        "Name {number} things to see in {city}.",
        "Write a shopping list for {food}.",
        "What are {number} ways to become more {trait}?",
        "List {number} jobs for people who like {field}.",
        "Give {number} reasons to visit {city}.",
        "Suggest {number} names for {animal}.",
        "List the steps to make {food}.",
        "Make a checklist for {thing}.",
        "Give me {number} interview questions about {field}.",
        "Name {number} books or films about {topic}.",
        "What are the top {number} mistakes people make with {thing}?",
    ),
    "code": (
        "Write a {language} function that {routine}.",
        "How do I write a program in {language} that {routine}?",
        "Show me an example of a {language} class for {thing}.",
        "Write {language} code which {routine}, with comments.",
        "Write a unit test for a {language} function that {routine}.",
        "Explain what a loop is in {language} and give an example.",
        "Create an HTML page about {topic}.",
        "Write a SQL query to list all customers who live in {city}.",
        "Fix my {language} code: it should be a function that {routine}, but it does not work.",
        "Give me a short {language} script that {routine} and prints the result.",
        "Write a {language} program that asks for a name and greets {name}.",
    ),
    "story": (
        "Write a short story about {person} in {place}.",
        "Tell me a story about {animal} and {animal}.",
        "Write a fairy tale about {person} and {animal}.",
        "Write the first paragraph of a novel about {person}.",
        "Tell a funny story about {name} and {thing}.",
        "Write a bedtime story for children about {animal}.",
        "Write a mystery that takes place in {place}.",
        "Continue this story: {name} opened the door and saw {animal}.",
        "Write a story with the title: The Secret of {place}.",
        "Write a poem about {topic}.",
        "Write a short poem about {animal} in {place}.",
        "Imagine that {person} meets {person}. What happens?",
    ),
    "explanation": (
        "Explain {topic} to a ten year old.",
        "Explain {topic} in simple words.",
        "Explain step by step how to prepare {thing}.",
        "Describe how {topic} works.",
        "Teach me the basics of {field}.",
        "Give a short overview of {topic}.",
        "Explain the role of {topic} in {field}.",
        "Compare {topic} with {topic}.",
        "What are the advantages and disadvantages of {topic}?",
        "Write an essay about {topic}.",
        "Describe {city} to someone who has never been there.",
        "Write an introduction to {topic} for a school book.",
    ),
    "rewrite": (
        "Correct the grammar: {sentence}",
        "Rewrite this sentence in a formal style: {sentence}",
        "Make this sentence shorter: {sentence}",
        "Rewrite this text so that it sounds friendly: {sentence}",
        "Summarize the following text in one sentence: {sentence} {sentence} {sentence}",
        "Turn this into a question: {sentence}",
        "Expand this sentence into a paragraph: {sentence}",
        "Say this in other words: {sentence}",
        "What is wrong with this sentence? {sentence}",
        "Translate into Spanish: {sentence}",
    ),
    "dialogue": (
        "Write a dialogue between {person} and {person}.",
        "Write a conversation between {name} and {name} about {topic}.",
        "You are {person}. Introduce yourself.",
        "Write an interview with {person} about {topic}.",
        "Hi! I am {name}. I would like to talk about {topic}.",
        "Pretend that you are {animal}. How was your day?",
        "Play the role of a teacher of {field} who answers my first question: what is {topic}?",
        "Write a phone call in which {name} asks about {event}.",
        "I feel sad today. Can you tell me something about {topic}?",
    ),
    "letter": (
        "Write an email about {event}.",
        "Write a letter from {name} to {name} about {event}.",
        "Write a polite message to my boss about {event}.",
        "Write a short advertisement for {thing}.",
        "Write a product description for {food}.",
        "Write a thank-you note to {person}.",
        "Write a speech about {topic} for a {field} class.",
        "Write a weekly plan for someone who wants to be {trait}.",
        "How do I ask {name} politely about {event}?",
        "Draft a notice about {event} for all employees.",
    ),
    "number": (
        "{name} has {number} apples and buys {number} more. How many apples does {name} have?",
        "What is {number} times {number}?",
        "A train travels {number} hours at {number}0 miles per hour. How far does it go?",
        "If {food} costs {number} dollars, how much do {number} portions cost?",
        "{name} reads {number} pages a day. How many pages does {name} read in {number} days?",
        "Solve for x: {number}x + {number} = {number}{number}.",
        "Count from {number} to {number}0.",
        "How many minutes are in {number} hours?",
        "What is the area of a rectangle with sides {number} and {number}{number}?",
    ),
}
"""The kinds of prompt. The last three templates of each kind are held out."""
HELD_OUT_TEMPLATES = 3
HELD_OUT_SHARE = 4
ASKED = "asked by the target"


def held(items: Sequence[str], count: int, held_out: bool) -> Sequence[str]:
    """The last ``count`` items if ``held_out``, else the others."""
    return items[-count:] if held_out else items[:-count]


def make_prompts(count: int, seed: int, *, held_out: bool = False) -> list[tuple[str, str]]:
    """Up to ``count`` different pairs (kind, prompt), the kinds in turn; fewer only if the combinations run out."""
    rng = random.Random(f"{seed} {held_out}")
    words = {name: held(items, max(2, len(items) // HELD_OUT_SHARE), held_out) for name, items in WORDS.items()}
    kinds = list(TEMPLATES)
    found: dict[str, str] = {}
    for attempt in range(4 * count):
        if len(found) == count:
            break
        kind = kinds[attempt % len(kinds)]
        template = rng.choice(held(TEMPLATES[kind], HELD_OUT_TEMPLATES, held_out))
        found.setdefault(re.sub(r"{(\w+)}", lambda slot: rng.choice(words[slot[1]]), template), kind)
    return [(kind, prompt) for prompt, kind in found.items()]


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """The token ids of a chat with this one user turn, up to where the answer begins."""
    return cast("list[int]", tokenizer(_chat(tokenizer, prompt), add_special_tokens=False)["input_ids"])


def _chat(tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return cast("str", tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


# ------------------------------------------------------------------------------------------------------ generation


@dataclass
class Corpus:
    """Prompts with their answers: ``tokens`` [document, position] int32, ``prompt_lens`` and ``lens`` [document]."""

    tokens: Tensor
    prompt_lens: Tensor
    lens: Tensor
    kinds: list[str]

    def select(self, chosen: Tensor) -> Corpus:
        """The documents with these indices, or for which this mask [document] holds."""
        rows = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen
        kinds = [self.kinds[row] for row in rows.tolist()]
        return Corpus(self.tokens[rows], self.prompt_lens[rows], self.lens[rows], kinds)

    @property
    def answer_tokens(self) -> int:
        return int((self.lens - self.prompt_lens).sum())


class Sampler:
    """Lets a target answer many prompts at once: each of ``batch`` rows takes the next prompt when it has ended one.

    A step feeds one token a row, a prompt's or an answer's, each row at its own position, so that every step is
    the same work, whatever the rows are at: on CUDA it is one graph. ``capacity`` is the longest document.
    """

    def __init__(self, target: Any, batch: int, capacity: int, eos: int) -> None:
        weight = target.lm_head.weight
        config = target.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache = (config.num_hidden_layers, batch, config.num_key_value_heads, capacity, head_dim)
        self.target, self.batch, self.capacity, self.eos = target, batch, capacity, eos
        self.device, self.dtype = weight.device, weight.dtype
        self.keys = torch.zeros(cache, dtype=self.dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)
        # one tensor, so that one copy logs a step: what each row feeds, where, and which prompt's document that is
        self.cursor = torch.zeros((3, batch), dtype=torch.long, device=self.device)
        self.tokens, self.positions, self.documents = self.cursor
        self.bias = torch.zeros((batch, 1, 1, capacity), dtype=self.dtype, device=self.device)
        self.slots = torch.arange(capacity, device=self.device)

    @torch.inference_mode()
    def answer(
        self,
        prompts: Sequence[tuple[str, list[int]]],
        temperatures: Sequence[float],
        *,
        limit: int | None = None,
        deadline: float = math.inf,
        advance: Callable[[int], object] = lambda answered: None,
    ) -> Corpus:
        """Answer (kind, prompt tokens) pairs, each until its end token or ``limit`` tokens with its prompt.

        A temperature of 0 is greedy. Past ``deadline`` (of `time.monotonic`) answers are cut where they are.
        """
        self._take(prompts, temperatures, min(limit or self.capacity, self.capacity))
        step = self._captured() if self.device.type == "cuda" else self._step
        log: list[Tensor] = []
        while time.monotonic() < deadline:
            for _ in range(32):
                log.append(self.cursor.to(torch.int32, copy=True))
                step()
            answered = int(self.taken) - self.batch
            advance(min(len(prompts), answered))
            if answered >= len(prompts) and bool((self.documents == len(prompts)).all()):
                break
        return self._harvest(log, [kind for kind, _ in prompts])

    def _take(self, prompts: Sequence[tuple[str, list[int]]], temperatures: Sequence[float], limit: int) -> None:
        """Lay the prompts out as a table [prompt, position], closed by one that idle rows repeat."""
        lens = [len(tokens) for _, tokens in prompts] + [1]
        table = torch.full((len(lens), max(lens)), self.eos)
        for row, (_, tokens) in enumerate(prompts):
            table[row, : len(tokens)] = torch.tensor(tokens)
        self.prompts, self.prompt_lens = table.to(self.device), torch.tensor(lens, device=self.device)
        self.temperatures = torch.tensor([*temperatures, 0.0], device=self.device)
        self.limit = torch.tensor(limit, device=self.device)
        self.taken = torch.zeros((), dtype=torch.long, device=self.device)
        self._rewind()

    def _rewind(self) -> None:
        self.documents.copy_(torch.arange(self.batch, device=self.device).clamp(max=len(self.prompts) - 1))
        self.positions.zero_()
        self.tokens.copy_(self.prompts[self.documents, 0])
        self.taken.fill_(self.batch)

    def _captured(self) -> Callable[[], None]:
        """The step as a CUDA graph. Warm-up and capture may move the cursor; it is set back after them."""
        for _ in range(2):
            self._step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._rewind()
        return graph.replay

    def _step(self) -> None:
        """Feed each row's token, then move each row on."""
        model = self.target.model
        self.bias.copy_(torch.where(self.slots <= self.positions[:, None], 0.0, -math.inf)[:, None, None])
        hidden = model.embed_tokens(self.tokens)[:, None]
        positions = self.positions[:, None]
        rotary = model.rotary_emb(hidden, positions)
        for layer in model.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=rotary, sampler=self)
        self._move_on(self._draw(self.target.lm_head(model.norm(hidden))[:, 0]))

    def _draw(self, logits: Tensor) -> Tensor:
        """Sample by adding Gumbel noise times the temperature: [row, vocabulary] → [row]."""
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_().clamp_(min=1e-20).log_()
        return (logits.float() - self.temperatures[self.documents, None] * noise).argmax(-1)

    def _move_on(self, drawn: Tensor) -> None:
        following = self.positions + 1
        answering = following >= self.prompt_lens[self.documents]
        ended = (following > self.prompt_lens[self.documents]) & (self.tokens == self.eos)
        ended |= following >= self.limit
        fresh = self.taken + ended.cumsum(0) - 1
        documents = torch.where(ended, fresh.clamp(max=len(self.prompts) - 1), self.documents)
        positions = torch.where(ended, 0, following)
        prompted = self.prompts[documents, positions.clamp(max=self.prompts.shape[1] - 1)]
        self.tokens.copy_(torch.where(answering & ~ended, drawn, prompted))
        self.positions.copy_(positions)
        self.documents.copy_(documents)
        self.taken += ended.sum()

    def _harvest(self, log: list[Tensor], kinds: list[str]) -> Corpus:
        """Gather the log, [3, row] a step, into documents. Rows that were idle fall into the closing prompt's."""
        if not log:
            raise ValueError("no time was left to answer any prompt: give more --minutes or a larger --answering")
        tokens, positions, documents = (part.flatten().long() for part in torch.stack(log).unbind(1))
        table = torch.full((len(self.prompts), self.capacity), self.eos, dtype=torch.int32, device=self.device)
        table[documents, positions] = tokens.int()
        lens = torch.zeros_like(self.prompt_lens).scatter_reduce_(0, documents, positions + 1, "amax")
        corpus = Corpus(table[:-1].cpu(), self.prompt_lens[:-1].cpu(), lens[:-1].cpu(), kinds)
        return corpus.select(corpus.lens > corpus.prompt_lens + 1)


def sampler_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sampler: Sampler,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of one token a row over the sampler's cache: query [row, heads, 1, head_dim]."""
    layer = cast("Any", module).layer_idx
    keys, values = sampler.keys[layer], sampler.values[layer]
    slot = sampler.positions[:, None, None, None].expand_as(key)
    keys.scatter_(2, slot, key)
    values.scatter_(2, slot, value)
    # the heads of a group become the rows of one query, so that each key and value is read once
    rows, _heads, _one, head_dim = query.shape
    grouped = query.view(rows, keys.shape[1], -1, head_dim)
    bias = sampler.bias.expand(-1, keys.shape[1], grouped.shape[2], -1)
    with _masked_attention_kernels(query):
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scaling)
    return attended.reshape(rows, 1, -1, head_dim), None


def _masked_attention_kernels(query: Tensor) -> contextlib.AbstractContextManager[None]:
    """Keep to kernels that take any mask and can be captured."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if query.device.type != "cuda":
        return contextlib.nullcontext()
    return cast(
        "contextlib.AbstractContextManager[None]", sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    )


@contextlib.contextmanager
def attention(config: Any, name: str) -> Iterator[None]:
    """Run a model with this config through another function of transformers' attention interface."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


# -------------------------------------------------------------------------------------------------------- training


def unroll(head: MTPHead, states: Tensor, token_ids: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield the states of draft steps 1 … ``steps`` for a start at every position at once.

    ``states`` [batch, seq, width] are the target's, ``token_ids`` [batch, seq]. Step k at start i takes token i + k
    and its result predicts token i + k + 1. It sees what the decode loop's draft cache would hold: the keys that
    step 1 made of the target's states up to i, then those of its own earlier steps. Starts within ``steps`` of the
    end are padding. The head must have been made with ``attn_implementation="specfsm_unrolled"``.
    """
    memory: list[tuple[Tensor, Tensor]] = []
    positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
    for step in range(1, steps + 1):
        inputs = token_ids.roll(-step, dims=1)
        states = head(states, inputs, positions + (step - 1), memory=memory)
        yield states


def unrolled_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    memory: list[tuple[Tensor, Tensor]],
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of draft step k over step 1's keys up to the start and one key of each later step.

    ``query`` [batch, heads, seq, head_dim]; the keys of all steps are concatenated along seq, and the mask is causal
    on the first block, diagonal on the others.
    """
    memory.append((key, value))
    groups = cast("Any", module).num_key_value_groups
    keys = torch.cat([keys for keys, _ in memory], dim=2).repeat_interleave(groups, dim=1)
    values = torch.cat([values for _, values in memory], dim=2).repeat_interleave(groups, dim=1)
    if len(memory) == 1:
        attended = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling)
    else:
        with _masked_attention_kernels(query):
            bias = unrolled_bias(query, len(memory))
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def unrolled_bias(query: Tensor, steps: int) -> Tensor:
    """The additive mask [1, 1, seq, steps * seq] of the last of ``steps`` draft steps."""
    seq = query.shape[2]
    causal = torch.ones((seq, seq), dtype=torch.bool, device=query.device).tril()
    own = torch.eye(seq, dtype=torch.bool, device=query.device)
    seen = torch.cat([causal] + [own] * (steps - 1), dim=1)
    return torch.where(seen, 0.0, -math.inf).to(query.dtype)[None, None]


class Distilled(NamedTuple):
    """Of some rows: the summed loss, its gradient by the student's states, and where the argmaxes agree."""

    loss: Tensor
    grad: Tensor
    agree: Tensor


def distill_rows(student: Tensor, teacher: Tensor, weight: Tensor, lm_head: Tensor, soft: float) -> Distilled:
    """Cross entropy of the student's tokens against the teacher's, over states [row, width], weighted by row.

    The goal is ``soft`` times the teacher's distribution plus the rest on its argmax, which is what greedy decoding
    accepts. The gradient is made at once, softmax minus goal: nothing of the size of the vocabulary is kept.
    """
    logits = (student @ lm_head.T).float()
    wanted = (teacher @ lm_head.T).float()
    best = wanted.argmax(-1)
    hit = torch.arange(logits.shape[-1], device=logits.device) == best[:, None]
    goal = soft * wanted.softmax(-1) + (1 - soft) * hit
    log_probs = logits.log_softmax(-1)
    loss = -(goal * log_probs).sum(-1) * weight
    grad = (log_probs.exp() - goal) * weight[:, None]
    return Distilled(loss.sum(), grad.to(lm_head.dtype) @ lm_head, logits.argmax(-1) == best)


class Distill(torch.autograd.Function):
    """`distill_rows` over any number of rows, in chunks of a fixed size, as one differentiable operation."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        weight: Tensor,
        lm_head: Tensor,
        chunk: int,
        rows: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        count = len(student)
        padding = (0, 0, 0, -count % chunk)
        parts = zip(
            split(F.pad(student.to(lm_head.dtype), padding), chunk),
            split(F.pad(teacher, padding), chunk),
            split(F.pad(weight, padding[2:]), chunk),
            strict=True,
        )
        done = [
            rows(part_student, part_teacher, part_weight, lm_head) for part_student, part_teacher, part_weight in parts
        ]
        ctx.save_for_backward(torch.cat([part.grad for part in done])[:count])
        agree = torch.cat([part.agree for part in done])[:count]
        ctx.mark_non_differentiable(agree)
        return torch.stack([part.loss for part in done]).sum(), agree

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _agree: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grad, None, None, None, None, None


distill: Callable[..., tuple[Tensor, Tensor]] = Distill.apply


def starts(prompt_lens: Tensor, lens: Tensor, seq: int, step: int) -> Tensor:
    """Where draft step ``step`` has a token to predict: [document, seq], from the last prompt token on."""
    position = torch.arange(seq, device=lens.device)
    return (position >= prompt_lens[:, None] - 1) & (position + step + 1 < lens[:, None])


def batches(corpus: Corpus, tokens: int, seed: int) -> Iterator[Tensor]:
    """Forever, indices of documents of about the same length, ``tokens`` padded tokens a batch, shuffled by seed."""
    width = padded(corpus.lens)
    for epoch in range(1 << 30):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(width), generator=generator)
        ready = [
            part
            for size in sorted(set(width.tolist()))
            for part in split(order[width[order] == size], max(1, tokens // size))
        ]
        for index in torch.randperm(len(ready), generator=generator).tolist():
            yield ready[index]


def split(whole: Tensor, size: int) -> list[Tensor]:
    """Parts of ``size`` rows, the last perhaps shorter."""
    return [whole[start : start + size] for start in range(0, len(whole), size)]


def padded(lens: Tensor) -> Tensor:
    """Lengths rounded up to a multiple of 64."""
    return (lens + 63) // 64 * 64


@dataclass
class Trainer:
    """A head in training, and what the steps need."""

    target: Any
    head: MTPHead
    corpus: Corpus
    settings: Settings
    rows: Callable[..., Any]
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.target.lm_head.weight.device
        # A step moves a parameter by a share of its own size: those of the target's last layer, made for a residual
        # stream of 25, are ten times as large as fresh ones.
        groups = [
            {"params": [parameter], "scale": max(float(parameter.detach().pow(2).mean().sqrt()), 1e-2)}
            for parameter in self.head.parameters()
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)

    def load(self, chosen: Tensor) -> tuple[Tensor, Corpus]:
        """Documents on the device, cut to their padded length, and the target's states of them."""
        part = self.corpus.select(chosen)
        seq = min(int(padded(part.lens).max()), part.tokens.shape[1])
        tokens = part.tokens[:, :seq].to(self.device).long()
        with torch.no_grad():
            states = self.target.model(input_ids=tokens, use_cache=False).last_hidden_state
        return states, Corpus(tokens, part.prompt_lens.to(self.device), part.lens.to(self.device), part.kinds)

    def step(self, chosen: Tensor, progress: float) -> tuple[float, list[float]]:
        """One optimizer step on these documents; returns the loss a token and the agreement at each draft step."""
        states, part = self.load(chosen)
        loss, agreement = self.loss(states, part)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        rate = self.settings.rate * schedule(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        self.optimizer.step()
        return float(loss.detach()), [float(rate) for rate in agreement]

    def loss(self, states: Tensor, part: Corpus) -> tuple[Tensor, list[Tensor]]:
        """The distillation loss of the unrolled steps, and each step's share of argmaxes that agree.

        A later step counts fully only where the earlier ones agreed: elsewhere the decode loop never gets to it.
        """
        lm_head = self.target.lm_head.weight
        seq = states.shape[1]
        alive = torch.ones(states.shape[:2], device=self.device)
        total = torch.zeros((), device=self.device)
        agreement = []
        for step, drafted in enumerate(unroll(self.head, states, part.tokens, self.settings.nextn), start=1):
            row, start = starts(part.prompt_lens, part.lens, seq, step).nonzero(as_tuple=True)
            weight = self.settings.decay ** (step - 1) * (0.25 + 0.75 * alive[row, start]) / max(1, len(row))
            loss, agree = distill(
                drafted[row, start], states[row, start + step], weight, lm_head, self.settings.chunk, self.rows
            )
            alive = alive.index_put((row, start), alive[row, start] * agree)
            agreement.append(agree.float().mean())
            total = total + loss
        return total, agreement


def schedule(progress: float) -> float:
    """A short warm-up, then a cosine to zero, over a run's progress from 0 to 1."""
    return min(1.0, progress / 0.03 + 0.01) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@torch.no_grad()
def fit_fuse(trainer: Trainer, chosen: Tensor) -> None:
    """Fit the head's first linear layer so that its output resembles what the target's last layer reads.

    Ridge regression from (state i, token i + 1) to the last layer's input at i + 1, on a batch of documents: the
    head then starts as the target's last layer on a guess of its input.
    """
    target, head = trainer.target, trainer.head
    _, part = trainer.load(chosen)
    output = target.model(input_ids=part.tokens, use_cache=False, output_hidden_states=True)
    row, start = starts(part.prompt_lens, part.lens, part.tokens.shape[1], 1).nonzero(as_tuple=True)
    state = head.state_norm(output.last_hidden_state[row, start].float())
    token = head.token_norm(target.model.embed_tokens(part.tokens[row, start + 1]).float())
    known = torch.cat((state, token), dim=-1)
    goal = output.hidden_states[-2][row, start + 1].float()
    with torch.autocast(known.device.type, enabled=False):  # bf16 sums would spoil the normal equations
        gram = known.T @ known
        gram.diagonal().add_(1e-2 * gram.diagonal().mean())
        head.fuse.weight.copy_(torch.linalg.solve(gram, known.T @ goal).T)


# ------------------------------------------------------------------------------------------------------ evaluation


class Acceptance(NamedTuple):
    """Greedy acceptance on some documents, for one nextn: decoding is replayed start by start."""

    tokens: int
    forwards: int
    reached: list[int]
    accepted: list[int]

    @property
    def mean(self) -> float:
        """Mean tokens a target forward, the prompt's forward not counted."""
        return self.tokens / max(1, self.forwards)

    @property
    def by_position(self) -> list[float]:
        """Share of drafts at each position that were accepted, of those that were reached."""
        return [good / max(1, tried) for good, tried in zip(self.accepted, self.reached, strict=True)]


def replay(matches: Tensor, prompt_lens: Tensor, lens: Tensor, nextn: int) -> Acceptance:
    """Walk through documents as greedy decoding with ``nextn`` drafts would.

    ``matches`` [step, document, start] says where the draft of a step equals the document's token.
    """
    tokens = forwards = 0
    reached, accepted = [0] * nextn, [0] * nextn
    runs = matches[:nextn].int().cumprod(0).sum(0).tolist()
    for run, prompt, end in zip(runs, prompt_lens.tolist(), lens.tolist(), strict=True):
        start = prompt - 1
        while start + 2 < end:
            room = end - 2 - start  # tokens still to come
            good = min(run[start], room)
            for position in range(min(nextn, room, good + 1)):
                reached[position] += 1
                accepted[position] += position < good
            gained = min(good + 1, room)
            tokens, forwards, start = tokens + gained, forwards + 1, start + gained
    return Acceptance(tokens, forwards, reached, accepted)


@torch.no_grad()
def find_matches(trainer: Trainer, corpus: Corpus) -> Tensor:
    """Where the draft of step k equals the document's token: [step, document, start]."""
    held = dataclasses.replace(trainer, corpus=corpus)
    nextn = trainer.settings.nextn
    matches = torch.zeros((nextn, *corpus.tokens.shape), dtype=torch.bool)
    for chosen in split(
        torch.arange(len(corpus.lens)), max(1, trainer.settings.batch_tokens // corpus.tokens.shape[1])
    ):
        states, part = held.load(chosen)
        seq = states.shape[1]
        for step, drafted in enumerate(unroll(trainer.head, states, part.tokens, nextn), start=1):
            row, start = starts(part.prompt_lens, part.lens, seq, step).nonzero(as_tuple=True)
            drafts = torch.cat([trainer.head.logits(few).argmax(-1) for few in split(drafted[row, start], 4096)])
            good = drafts == part.tokens[row, start + step + 1]
            matches[step - 1, chosen[row.cpu()], start.cpu()] = good.cpu()
    return matches


def evaluate(trainer: Trainer, corpus: Corpus) -> dict[str, dict[int, Acceptance]]:
    """Acceptance for nextn 1, 2, …, over all documents (under ``"all"``) and for each kind of prompt."""
    matches = find_matches(trainer, corpus)
    report = {}
    for kind in ["all", *dict.fromkeys(corpus.kinds)]:
        rows = torch.tensor([kind in ("all", other) for other in corpus.kinds]).nonzero()[:, 0]
        part = corpus.select(rows)
        report[kind] = {
            nextn: replay(matches[:, rows], part.prompt_lens, part.lens, nextn)
            for nextn in range(1, trainer.settings.nextn + 1)
        }
    return report


# ------------------------------------------------------------------------------------------------------------- run


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Settings:
    """What a run depends on. Each field is an option of the command line."""

    target: str = _option("", "transformers folder or GGUF file of the target (default: the shipped one)")
    output: str = _option("draft_head.safetensors", "where the best weights go, each time they get better")
    report: str = _option("", "JSON file for the acceptance on held-out prompts")
    checkpoint: str = _option("", "file to save progress in, and to resume from if it exists")
    device: str = _option("", "cuda or cpu (default: cuda if there is one)")
    seed: int = _option(0, "seed of prompts, answers and order")
    minutes: float = _option(0.0, "stop after so many minutes in all, answers included (default: no bound)")
    prompts: int = _option(60_000, "prompts to answer")
    asked: float = _option(0.5, "share of the prompts that the target writes itself")
    greedy: float = _option(0.75, "share of the prompts answered greedily; the others at --temperature")
    temperature: float = _option(0.7, "temperature of the other answers")
    answering: float = _option(0.25, "share of --minutes after which answering stops")
    held_out: int = _option(504, "held-out prompts, answered greedily")
    length: int = _option(384, "longest document, prompt and answer, in tokens")
    batch: int = _option(1024, "documents answered at once")
    steps: int = _option(0, "optimizer steps (default: what --minutes allows, else 3000)")
    batch_tokens: int = _option(24_576, "padded tokens a step")
    chunk: int = _option(4096, "rows of logits at once")
    rate: float = _option(0.015, "peak learning rate, relative to each parameter's size")
    soft: float = _option(0.7, "weight of the target's distribution against its argmax")
    decay: float = _option(0.9, "weight of each further draft step")
    nextn: int = _option(3, "draft steps to unroll")
    mlp_width: int = _option(0, "width of the head's MLP (default: the target's)")
    every: int = _option(500, "steps between evaluations")
    tiny: bool = _option(False, "a small random target on the CPU, in a minute: a test of the code")


TINY = {
    "device": "cpu",
    "prompts": 96,
    "held_out": 18,
    "length": 192,
    "batch": 48,
    "steps": 60,
    "batch_tokens": 2048,
    "chunk": 512,
    "every": 30,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser one option for each field of `Settings`."""
    for option in dataclasses.fields(Settings):
        name, meaning = "--" + option.name.replace("_", "-"), option.metadata["meaning"]
        if isinstance(option.default, bool):
            parser.add_argument(name, action="store_true", help=meaning)
        else:
            shown = "" if option.default in ("", 0) or "default" in meaning else " (default: %(default)s)"
            parser.add_argument(name, type=type(option.default), default=option.default, help=meaning + shown)


def from_arguments(arguments: argparse.Namespace) -> Settings:
    """The settings that a parser with `add_arguments` has read."""
    settings = Settings(**{option.name: getattr(arguments, option.name) for option in dataclasses.fields(Settings)})
    return shrink(settings) if settings.tiny else settings


def shrink(settings: Settings) -> Settings:
    """The settings of a ``--tiny`` run, but for those that were given."""
    left = {name: value for name, value in TINY.items() if getattr(settings, name) == getattr(Settings, name)}
    return dataclasses.replace(settings, **cast("dict[str, Any]", left))


def train(settings: Settings) -> dict[str, dict[int, Acceptance]]:
    """Make the data, train, save the best head to ``settings.output``; return its held-out acceptance."""
    torch.manual_seed(settings.seed)
    clock = Clock(settings)
    target, tokenizer = _load(settings)
    with _progress() as progress:
        saved = _restore(settings)
        corpus, held_out = saved["data"] if saved else _generate(settings, clock, target, tokenizer, progress)
        progress.console.print(
            f"{len(corpus.lens)} documents, {corpus.answer_tokens:,} answer tokens; held out: {len(held_out.lens)}, "
            f"{held_out.answer_tokens:,}; {clock.spent:.0f} s"
        )
        head = MTPHead(target.config, mlp_width=settings.mlp_width or None, attn_implementation="specfsm_unrolled").to(
            target.device
        )
        trainer = Trainer(target, head.attach(target).start_from(target), corpus, settings, _rows(settings, target))
        with _precision(target):
            report = _optimize(trainer, held_out, clock, progress, saved)
        _show(progress, report)
    return report


class Clock:
    """What is left of a run that is bounded by ``--minutes``."""

    RESERVE = 15.0
    """Seconds kept for the last evaluation."""

    def __init__(self, settings: Settings) -> None:
        self.began = time.monotonic()
        self.budget = settings.minutes * 60 or math.inf
        self.answers_end = self.began + self.budget * settings.answering
        self.questions_end = self.began + self.budget * settings.answering * 0.4
        self.end = self.began + max(self.budget - self.RESERVE, self.budget / 2)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began


def _load(settings: Settings) -> tuple[Any, Any]:
    from transformers import AttentionInterface

    AttentionInterface.register("specfsm_sampler", sampler_attention)
    AttentionInterface.register("specfsm_unrolled", unrolled_attention)
    if settings.tiny and not settings.target:
        target, tokenizer = tiny_target(settings.seed)
        return target.to(settings.device, torch.bfloat16 if settings.device != "cpu" else None), tokenizer
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return load_target(settings.target or None, dtype=dtype, device=device, attn_implementation="sdpa")


def tiny_target(seed: int) -> tuple[Any, Any]:
    """A random two-layer target and a byte tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer = tokenizer_class(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}>{{ m['content'] }}<|end|>{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target: Any = LlamaForCausalLM(config)
    return target.train(False).requires_grad_(False), tokenizer


def _generate(
    settings: Settings, clock: Clock, target: Any, tokenizer: Any, progress: Progress
) -> tuple[Corpus, Corpus]:
    """Make the corpus: held-out answers first, then the prompts that the target writes, then all answers."""
    sampler = Sampler(target, min(settings.batch, settings.prompts), settings.length, tokenizer.eos_token_id)

    def answer(title: str, prompts: list[tuple[str, list[int]]], warmth: list[float], **bounds: Any) -> Corpus:
        task = progress.add_task(title, total=len(prompts))
        with attention(target.config, "specfsm_sampler"):
            return sampler.answer(prompts, warmth, advance=lambda done: progress.update(task, completed=done), **bounds)

    def encoded(pairs: list[tuple[str, str]]) -> list[tuple[str, list[int]]]:
        tokens = [(kind, encode(tokenizer, text)) for kind, text in pairs]
        return [(kind, ids) for kind, ids in tokens if len(ids) < settings.length * 2 // 3]

    examples = encoded(make_prompts(settings.held_out, settings.seed, held_out=True))
    held_out = answer("held-out answers", examples, [0.0] * len(examples))
    count = round(settings.prompts * settings.asked)
    opening = [(ASKED, user_turn(tokenizer))] * count
    bounds = {"limit": min(settings.length, len(opening[0][1]) + 96), "deadline": clock.questions_end} if count else {}
    asked = questions(tokenizer, answer("the target asks", opening, [0.9] * count, **bounds)) if count else []
    pairs = asked + make_prompts(settings.prompts - len(asked), settings.seed)
    rng = random.Random(settings.seed)
    rng.shuffle(pairs)
    prompts = encoded(pairs)
    warmth = [0.0 if rng.random() < settings.greedy else settings.temperature for _ in prompts]
    return answer("answers", prompts, warmth, deadline=clock.answers_end), held_out


def user_turn(tokenizer: Any) -> list[int]:
    """The tokens of a chat up to where the user begins to write."""
    opening = _chat(tokenizer, "\0").split("\0")[0]
    return cast("list[int]", tokenizer(opening, add_special_tokens=False)["input_ids"])


def questions(tokenizer: Any, corpus: Corpus) -> list[tuple[str, str]]:
    """The different user turns that the target has written and ended, as prompts."""
    ended = corpus.tokens[torch.arange(len(corpus.lens)), corpus.lens - 1] == tokenizer.eos_token_id
    part = corpus.select(ended)
    spans = zip(part.tokens.tolist(), part.prompt_lens.tolist(), part.lens.tolist(), strict=True)
    texts = (tokenizer.decode(tokens[start : end - 1]).strip() for tokens, start, end in spans)
    return [(ASKED, text) for text in dict.fromkeys(texts) if text]


def _rows(settings: Settings, target: Any) -> Callable[..., Any]:
    """`distill_rows` for this run, compiled where that pays: it fuses six passes over the logits into two."""

    def rows(student: Tensor, teacher: Tensor, weight: Tensor, lm_head: Tensor) -> Distilled:
        return distill_rows(student, teacher, weight, lm_head, settings.soft)

    if target.device.type != "cuda":
        return rows
    compiled = torch.compile(rows, dynamic=False)
    lm_head = target.lm_head.weight
    states, weight = lm_head[: settings.chunk], lm_head.new_ones(min(settings.chunk, len(lm_head)), dtype=torch.float32)
    try:
        with torch.no_grad(), _precision(target):  # as in training: it is compiled anew for another mode
            compiled(states, states, weight, lm_head)
    except Exception as error:  # whatever the compiler lacks here, the plain function does the same, slower
        print(f"not compiled ({type(error).__name__}): training is slower", file=sys.stderr)
        return rows
    return compiled


def _precision(target: Any) -> contextlib.AbstractContextManager[Any]:
    """The head's parameters stay float32; on CUDA its matrix products are bf16."""
    return torch.autocast("cuda", torch.bfloat16) if target.device.type == "cuda" else contextlib.nullcontext()


def _optimize(
    trainer: Trainer, held_out: Corpus, clock: Clock, progress: Progress, saved: dict[str, Any] | None
) -> dict[str, dict[int, Acceptance]]:
    """Train to the last step or the deadline; keep the best head and return its report."""
    settings = trainer.settings
    limit = settings.steps or (sys.maxsize if settings.minutes else 3000)
    order = batches(trainer.corpus, settings.batch_tokens, settings.seed)
    began, done, resumed_at, best = clock.spent, 0, 0.0, Best(trainer, held_out)
    if saved:
        done, resumed_at = _resume(trainer, best, saved)
        for _ in range(done):
            next(order)
    else:
        fit_fuse(trainer, next(batches(trainer.corpus, settings.batch_tokens, settings.seed)))
        best.consider(0, progress)
    task = progress.add_task("training", total=1.0)
    while done < limit and time.monotonic() < clock.end:
        timed = (clock.spent - began) / (clock.end - clock.began - began)
        by_steps = settings.steps or not settings.minutes
        share = done / limit if by_steps else resumed_at + (1 - resumed_at) * timed
        loss, agreement = trainer.step(next(order), share)
        done += 1
        agreed = " ".join(f"{rate:.3f}" for rate in agreement)
        line = f"step {done}  loss {loss:.3f}  agree {agreed}"
        progress.update(task, completed=share, description=line)
        if done % settings.every == 0 and done < limit:
            progress.console.print(f"{line}  {clock.spent:.0f} s")
            best.consider(done, progress)
            _save(best, done, share)
    best.consider(done, progress)
    _save(best, done, 1.0)
    return best.report


class Best:
    """The best head so far by held-out tokens a forward at the largest nextn, written out at once."""

    def __init__(self, trainer: Trainer, held_out: Corpus) -> None:
        self.trainer, self.held_out = trainer, held_out
        self.mean = 0.0
        self.report: dict[str, dict[int, Acceptance]] = {}

    def consider(self, step: int, progress: Progress) -> None:
        """Evaluate the head as it is, and save it if none was better."""
        settings = self.trainer.settings
        report = evaluate(self.trainer, self.held_out)
        means = [result.mean for result in report["all"].values()]
        progress.console.print(f"step {step}: tokens a forward {' '.join(f'{mean:.3f}' for mean in means)}")
        if means[-1] <= self.mean:
            return
        self.mean, self.report = means[-1], report
        facts = {
            "target": Path(self.trainer.target.config.name_or_path or "tiny").name,
            "nextn": settings.nextn,
            "seed": settings.seed,
            "steps": step,
            "documents": len(self.trainer.corpus.lens),
            "answer_tokens": self.trainer.corpus.answer_tokens,
            "tokens_per_forward": json.dumps([round(mean, 4) for mean in means]),
        }
        self.trainer.head.save(settings.output, facts)
        if settings.report:
            Path(settings.report).write_text(json.dumps(_as_json(facts, settings, report), indent=1))


def _as_json(facts: dict[str, object], settings: Settings, report: dict[str, dict[int, Acceptance]]) -> object:
    kinds = {
        kind: {
            nextn: {
                "tokens_per_forward": round(result.mean, 4),
                "by_position": [round(p, 4) for p in result.by_position],
            }
            for nextn, result in results.items()
        }
        for kind, results in report.items()
    }
    return {"facts": facts, "settings": dataclasses.asdict(settings), "held_out": kinds}


def _save(best: Best, step: int, share: float) -> None:
    trainer, checkpoint = best.trainer, best.trainer.settings.checkpoint
    if not checkpoint:
        return
    partial = Path(checkpoint + ".partial")
    state = {
        "data": [dataclasses.asdict(trainer.corpus), dataclasses.asdict(best.held_out)],
        "head": trainer.head.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "step": step,
        "share": share,
        "best": best.mean,
        "report": {kind: {n: tuple(r) for n, r in results.items()} for kind, results in best.report.items()},
    }
    torch.save(state, partial)
    partial.rename(checkpoint)


def _restore(settings: Settings) -> dict[str, Any] | None:
    if not settings.checkpoint or not Path(settings.checkpoint).is_file():
        return None
    saved: dict[str, Any] = torch.load(settings.checkpoint, map_location="cpu", weights_only=True)
    saved["data"] = [Corpus(**fields) for fields in saved["data"]]
    return saved


def _resume(trainer: Trainer, best: Best, saved: dict[str, Any]) -> tuple[int, float]:
    """Set head, optimizer and best report as they were; returns the steps done and their share of the run."""
    trainer.head.load_state_dict(saved["head"])
    trainer.optimizer.load_state_dict(saved["optimizer"])
    best.mean = saved["best"]
    best.report = {k: {n: Acceptance(*r) for n, r in results.items()} for k, results in saved["report"].items()}
    return saved["step"], saved["share"]


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())


def _show(progress: Progress, report: dict[str, dict[int, Acceptance]]) -> None:
    from rich.table import Table

    nextns = list(report["all"])
    table = Table(title="held-out prompts, greedy", title_justify="left")
    table.add_column("kind")
    for nextn in nextns:
        table.add_column(f"tokens a forward, nextn {nextn}", justify="right")
    table.add_column(f"accepted by position, nextn {nextns[-1]}")
    for kind, results in report.items():
        rates = "  ".join(f"{rate:.3f}" for rate in results[nextns[-1]].by_position)
        table.add_row(kind, *(f"{results[nextn].mean:.3f}" for nextn in nextns), rates)
    progress.console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="specfsm train-draft", description=(__doc__ or "").split("\n\n")[0])
    add_arguments(parser)
    try:
        train(from_arguments(parser.parse_args(arguments)))
    except (FileNotFoundError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
