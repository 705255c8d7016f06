"""Flags of all commands."""

import pytest

from ngrammer_jax import flags


def test_a_misspelled_flag_is_named_before_missing_ones(capsys):
  parser = flags.make_parser('analyze', '')
  analysis = parser.add_subparsers(dest='analysis').add_parser('checkpoint')
  analysis.add_argument('--workdir', required=True)
  analysis.add_argument('--step')
  with pytest.raises(SystemExit) as caught:
    parser.parse_args(['checkpoint', '--workdr=x'])
  assert caught.value.code == 2
  assert 'no flag --workdr: did you mean --workdir?' in capsys.readouterr().err
  assert parser.parse_args(['checkpoint', '--work=x', '--step', '5']).step == '5'
  with pytest.raises(SystemExit):
    parser.parse_args(['checkpoint', '--training.steps=5'])
  assert 'did you mean --config.training.steps?' in capsys.readouterr().err
