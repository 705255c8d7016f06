"""Tiny models of four kinds of tokenizers answer as with `hf`, the harness's own model."""

import pytest

from tests.tasks import harness_cases

pytest.importorskip('lm_eval', reason='lm_eval is not installed: pip install lm_eval')


def check(folder, answered, batch_size, **arguments):
  """Answers all requests of a kind at once, and compares the answers."""
  from ngrammer_jax.tasks.lm_eval import model

  ours = model.HarnessModel(pretrained=str(folder), batch_size=batch_size, **arguments)
  for kind in ('loglikelihood', 'loglikelihood_rolling', 'generate_until'):
    group = [one for one in answered if one.request.kind == kind]
    values = getattr(ours, kind)([one.request.instance for one in group])
    for one, value in zip(group, values, strict=True):
      one.check(value)


def test_stored_answers(tmp_path, one_device, monkeypatch):
  harness_cases.score_in_one_program(monkeypatch, harness_cases.POSITIONS, choices=1)
  stored = harness_cases.read_stored()
  for model in harness_cases.MODELS:
    check(model.write(tmp_path), stored[model.name], batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize('model', harness_cases.MODELS, ids=lambda model: model.name)
def test_drawn_requests(tmp_path, one_device, model):
  """With the begin token as the model adds it, always and never."""
  pytest.importorskip('transformers', reason='transformers is not installed')
  from tests.tasks import harness_oracle

  folder = model.write(tmp_path)
  requests = list(harness_cases.draw(model))
  num_answered = 0
  for add_bos_token in (None, True, False):
    theirs = harness_oracle.load(folder, add_bos_token=add_bos_token)
    answered = harness_oracle.answer(theirs, requests)
    num_answered += sum(one.value is not None and one.is_decided for one in answered)
    for batch_size in (1, 4):
      check(folder, answered, batch_size, add_bos_token=add_bos_token)
  assert num_answered >= 0.9 * 3 * len(requests)


def test_begin_tokens(tmp_path):
  """As with `hf`: `add_bos_token` adds one where the tokenizer has one, a spelled one is enough."""
  from ngrammer_jax.tasks.lm_eval import model

  plain, begins, _, _, has_but_adds_none, *_ = harness_cases.MODELS
  cases = [
    (plain, None, [102], [1, 102]),
    (plain, True, [102], [1, 102]),
    (begins, None, [1, 102], [1, 102]),
    (begins, True, [1, 102], [1, 102]),
    (begins, False, [102], [1, 102]),
    (has_but_adds_none, None, [310], [1, 260]),
    (has_but_adds_none, True, [1, 310], [1, 260]),
  ]
  for case, add_bos_token, expected, spelled in cases:
    folder = tmp_path / case.name
    if not folder.exists():
      case.write(tmp_path)
    ours = model.HarnessModel(pretrained=str(folder), add_bos_token=add_bos_token)
    assert ours.tok_encode('a') == expected
    assert ours.tok_encode('<s>a') == spelled
    assert ours.tok_encode('a', add_special_tokens=False) == expected[-1:]


def test_where_an_answer_ends(tmp_path):
  """At the spelling of a stop, with special tokens; its text has none and ends before the stop."""
  from ngrammer_jax.data.vocabularies import published
  from ngrammer_jax.inference.sampling import SamplingConfig
  from ngrammer_jax.tasks.lm_eval import answers

  harness_cases.MODELS[0].write(tmp_path)
  vocabulary = published.read(tmp_path / harness_cases.MODELS[0].name, None)
  generated = vocabulary.encode(b'the<|im_start|> cat<|im_end|> on', special=True).tolist()
  cases = [
    (('<|im_end|>',), (), 'the<|im_start|> cat<|im_end|>', 'the cat'),
    (('t<|im_end|>',), (), 'the<|im_start|> cat<|im_end|>', 'the cat'),
    (('on', ' ca'), (), 'the<|im_start|> ca', 'the'),
    ((), (4,), 'the<|im_start|> cat<|im_end|>', 'the cat'),
    (('',), (), 'the', 'the'),  # it is in the first token
    ((), (), 'the<|im_start|> cat<|im_end|> ', 'the cat '),
  ]
  for stops, end_tokens, read, text in cases:
    config = answers.AnswerConfig(stops, 8, SamplingConfig(0.0))
    answer = answers.Answer(vocabulary, end_tokens, config)
    tokens = []
    for token in generated:
      if answer.is_done:
        break
      answer.add(token)
      tokens.append(token)
    assert (vocabulary.decode(tokens, special=True).decode(), answer.text) == (read, text)
