"""Questions about a picture, answered by a vision-language model."""

import json
from pathlib import Path

import torch
import transformers

import rewards
from inputs import download
from reward_models import CHINESE, SMALL, lend_gpu, load_pretrained

QUESTIONS = Path(__file__).resolve().parents[1] / "prompts" / "questions.jsonl"
AT_ONCE = 8  # pictures per forward pass; a picture counts once per question


class Vqa:
    """How sure a vision-language model is of the correct answers about a picture, 0..1: their mean.

    Every prompt gets the question whether the picture shows it (VQAScore, Lin et al. 2024), and
    those that a file has for it, each about one thing: questions that a correct picture answers by
    yes, and foils that it answers by no ("Is the carrot orange?" for a purple one), or any picture
    would please a model that agrees with everything.

    A question counts sigmoid(odds / 2), where odds are the log-odds of the correct answer. Raw log-
    odds would pay as much for making a sure answer surer (+5 to +9) as for correcting a wrong one
    (-2 to +2); the sigmoid pays .06 and .46. log P has no floor: one question that no picture
    passes would rule the mean. The odds are halved because P itself, which Soft-TIFA (Kamath et al.
    2025) averages, is near 0 or 1 for most pictures, and equal rewards teach nothing.

    model: folder or hub id of an AutoModelForImageTextToText with a chat template. questions: see
    read_questions. SmolVLM only knows English, so Chinese prompts get NaN unless the file has
    (English) questions for them.
    """

    def __init__(self, model, questions=QUESTIONS):
        self.questions = read_questions(questions)
        self.reads_chinese = model != rewards.SMOLVLM
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        self.model = load_pretrained(transformers.AutoModelForImageTextToText, model, dtype)
        folder = download(model, *SMALL)
        self.processor = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=False)
        tokenizer = self.processor.tokenizer
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        self.yes = answer_ids(tokenizer, "yes")
        self.no = answer_ids(tokenizer, "no")

    def __call__(self, images, prompts):
        return self.means([[image] for image in images], prompts)

    def means(self, shown, prompts):
        """N lists of pictures shown together, N prompts -> (N,) float32, NaN if none is asked."""
        return torch.stack([values.mean() for values in self.values(shown, prompts)])

    def answers(self, image, prompt):
        """{question: value in 0..1} for a picture, to look at: near 1 if correct, for foils too."""
        (values,) = self.values([[image]], [prompt])
        return dict(zip(self.about(prompt), values.tolist()))

    def about(self, prompt):
        """{question: 1 if a correct picture answers yes, -1 if no}, the general one first."""
        prompt = prompt.strip()
        own = self.questions.get(prompt, {})
        if CHINESE.search(prompt) and not self.reads_chinese:
            return own
        unnested = prompt.replace('"', "'")  # the question puts the whole prompt in double quotes
        return {f'Does this image show "{unnested}"?': 1} | own

    def values(self, shown, prompts):
        """N lists of pictures shown together, N prompts -> N of (questions,) float32, in 0..1."""
        about = [self.about(prompt) for prompt in prompts]
        asked = [(pictures, question) for pictures, each in zip(shown, about) for question in each]
        size = AT_ONCE // len(shown[0])
        with lend_gpu(self.model) as device:
            starts = range(0, len(asked), size)
            odds = [self.log_odds(asked[at : at + size], device) for at in starts]
        signs = torch.tensor([float(sign) for each in about for sign in each.values()])
        values = (signs * torch.cat([torch.zeros(0), *odds]) / 2).sigmoid()
        return values.split(list(map(len, about)))

    def log_odds(self, asked, device):
        """B of (pictures, question) -> (B,) float32, of an answer's first token, in one pass."""

        def chat(shown, question):
            words = [{"type": "image"}] * len(shown)
            words.append({"type": "text", "text": f"{question} Please answer Yes or No."})
            messages = [{"role": "user", "content": words}]
            return self.processor.apply_chat_template(messages, add_generation_prompt=True)

        inputs = self.processor(
            text=[chat(*each) for each in asked],
            images=[shown for shown, _ in asked],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        inputs = inputs.to(device, self.model.dtype)
        # A cache would take 2.4 GB, and nothing reads it.
        output = self.model(**inputs, logits_to_keep=1, use_cache=False)
        logits = output.logits[:, -1].float()  # (B, V)
        return (logits[:, self.yes].logsumexp(-1) - logits[:, self.no].logsumexp(-1)).cpu()


class Edit(Vqa):
    """How sure a vision-language model is that an edit was made, and nothing else changed, 0..1.

    It sees source and result in one chat and gets two questions (Edit-R1, Li et al. 2025, asks for
    a grade). The mean of their values, see Vqa: a picture left as it was gets half.
    """

    def __call__(self, images, prompts, sources):
        return self.means(list(zip(sources, images)), prompts)

    def about(self, prompt):
        if CHINESE.search(prompt) and not self.reads_chinese:
            return {}
        done = prompt.strip().replace('"', "'")
        return {
            f'Has the first picture been changed as asked: "{done}"?': 1,
            "Is everything else in the second picture as it was in the first?": 1,
        }


def answer_ids(tokenizer, word):
    """The ids of tokens that an answer may begin with, each once; a space alone begins none."""
    spellings = [word.title(), word, f" {word.title()}", f" {word}"]
    ids = {tokenizer(spelling, add_special_tokens=False).input_ids[0] for spelling in spellings}
    return sorted(i for i in ids if word.startswith(tokenizer.decode([i]).strip().lower() or " "))


def read_questions(path):
    """{prompt: {question: 1, foil: -1}} of lines {"prompt": "", "questions": [], "foils": []}."""
    found = {}
    for line in filter(None, Path(path).read_text(encoding="utf-8-sig").split("\n")):
        row = json.loads(line)
        signs = dict.fromkeys(row["questions"], 1) | dict.fromkeys(row.get("foils", []), -1)
        found.setdefault(row["prompt"].strip(), {}).update(signs)
    return found
