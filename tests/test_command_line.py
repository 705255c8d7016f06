"""The config on the command line: files and variants, overrides in all their forms."""

import argparse
import pathlib

import pytest

from ngrammer_jax import command_line, config, errors
from ngrammer_jax.config import catalog, fields
from ngrammer_jax.config import model as model_config
from ngrammer_jax.training import init_from
from tests.checks import bad_input
from tests.loops import each

PLAIN = """
from ngrammer_jax import config

def get_config():
  c = config.default()
  c.seed = 7
  return c
"""
VARIANTS = """
from ngrammer_jax import config
from ngrammer_jax import errors

VARIANTS = {'small': 64, 'large': 512}

def get_config(variant='small'):
  if variant not in VARIANTS:
    raise errors.BadInput(f'no variant {variant}; available: {", ".join(VARIANTS)}')
  c = config.default()
  c.model.width = VARIANTS[variant]
  return c
"""
NGRAM = """
from ngrammer_jax import config

def get_config():
  c = config.default()
  c.model.ngram = config.block('model.ngram', dim=4)
  return c
"""


@pytest.fixture
def folder(tmp_path):
  for name, text in (('plain', PLAIN), ('variants', VARIANTS), ('ngram', NGRAM)):
    (tmp_path / f'{name}.py').write_text(text)
  return tmp_path


@pytest.fixture
def parse(folder):
  """Returns a function from command line arguments to the config."""

  def parse(*arguments, file='plain.py'):
    argv = [f'--config={folder}/{file}', *arguments]
    return command_line.parse(argparse.ArgumentParser(), argv)[1]

  return parse


def test_file_is_the_config(parse):
  assert parse() == config.Config(seed=7)


def test_file_knows_its_folder_from_anywhere(folder, monkeypatch):
  text = PLAIN.replace('c.seed = 7', "c.data.path = __file__.replace('own.py', 'corpus.txt')")
  (folder / 'own.py').write_text(text)
  monkeypatch.chdir(folder)
  _, parsed = command_line.parse(argparse.ArgumentParser(), ['--config=own.py'])
  assert parsed.data.path == str(folder / 'corpus.txt')


@each('variant, width', [('', 64), (':small', 64), (':large', 512)])
def test_variant_is_the_argument_of_the_file(parse, variant, width):
  assert parse(file=f'variants.py{variant}').model.width == width


def test_huggingface_is_another_name_of_the_tokenizer(parse, tmp_path):
  file = tmp_path / 'tokenizer.json'
  file.touch()
  path, size = f'--config.data.vocabulary_path={file}', '--config.data.vocabulary_size=None'
  named, other = (
    parse(f'--config.data.vocabulary={kind}', path, size) for kind in ('tokenizer', 'huggingface')
  )
  assert other == named and other.data.vocabulary == 'tokenizer'


def test_a_config_of_the_package_has_a_name(parse, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  load = command_line.load_file
  path = pathlib.Path(__file__).parents[1] / 'configs' / 'ngrammer_text8.py'
  assert load('ngrammer_text8:primer') == load(f'{path}:primer') != load('ngrammer_text8')
  with bad_input(
    '--config=quickstrat: no file and no config of the package quickstrat: did you mean '
    'quickstart? Available: adaptive_span, attention_lstm, ngram_memories, ngrammer_c4, '
    'ngrammer_text8, quickstart, superglue, transformer, transformer_xl'
  ):
    load('quickstrat')
  with bad_input(
    '--config=configs/ngrammer_text8.py:primer: no file configs/ngrammer_text8.py: use the config '
    'of the package, ngrammer_text8:primer'
  ):
    load('configs/ngrammer_text8.py:primer')


@each('installed', [True, False])
def test_configs_are_found_in_a_checkout_and_in_an_installed_package(
  tmp_path, monkeypatch, installed
):
  package = tmp_path / str(installed) / 'ngrammer_jax'
  folder = (package if installed else package.parent) / 'configs'
  folder.mkdir(parents=True)
  for name in ('__init__.py', 'small.py', 'notes.txt'):
    (folder / name).touch()
  monkeypatch.setattr(catalog, 'PACKAGE', package)
  assert catalog.files() == {'small': folder / 'small.py'}


def test_plain_flags_are_parsed_beside_the_config(folder):
  parser = argparse.ArgumentParser()
  parser.add_argument('--workdir')
  options, resolved = command_line.parse(
    parser, ['--workdir', 'x', '--config.seed', '3', '--config', f'{folder}/plain.py']
  )
  assert (options.workdir, resolved.seed) == ('x', 3)


@each(
  'arguments, key, value',
  [
    (['--config.training.steps=2000'], 'training.steps', 2000),
    (['--config.training.steps', '2000'], 'training.steps', 2000),
    (['--config.training.steps=1e4'], 'training.steps', 10_000),
    (['--config.training.steps=1_000'], 'training.steps', 1000),
    (['--config.training.steps=10', '--config.training.steps=20'], 'training.steps', 20),
    (['--config.mesh.data', '-1'], 'mesh.data', -1),
    (['--config.seed=9'], 'seed', 9),
    (['--config.optimizer.learning_rate=3e-4'], 'optimizer.learning_rate', 3e-4),
    (['--config.optimizer.learning_rate=1'], 'optimizer.learning_rate', 1.0),
    (['--config.optimizer.clip_norm=None'], 'optimizer.clip_norm', None),
    (['--config.optimizer.clip_norm=none'], 'optimizer.clip_norm', None),
    (['--config.optimizer.clip_norm=0.5'], 'optimizer.clip_norm', 0.5),
    (['--config.evaluation.max_tokens=1e3'], 'evaluation.max_tokens', 1000),
    (['--config.model.bias'], 'model.bias', True),
    (['--config.model.bias=true'], 'model.bias', True),
    (['--config.model.bias=True'], 'model.bias', True),
    (['--config.model.bias=1'], 'model.bias', True),
    (['--noconfig.model.gated'], 'model.gated', False),
    (['--noconfig.model.scan_layers'], 'model.scan_layers', False),
    (['--config.model.scan_layers', '--config.seed=9'], 'model.scan_layers', True),
    (['--config.model.scan_layers=4'], 'model.scan_layers', 4),
    (['--config.model.gated=false'], 'model.gated', False),
    (['--config.model.gated=False'], 'model.gated', False),
    (['--config.model.gated=0'], 'model.gated', False),
    (['--config.model.bias', '--config.seed=9'], 'model.bias', True),
    (['--config.data.path=/a=b c:d'], 'data.path', '/a=b c:d'),
    (['--config.data.path', '123'], 'data.path', '123'),
    (['--config.data.path=None'], 'data.path', None),
    (['--config.data.path=True'], 'data.path', 'True'),
    (['--config.model.position=none'], 'model.position', 'none'),
  ],
)
def test_override_has_the_declared_type(parse, arguments, key, value):
  resolved = parse(*arguments)
  for part in key.split('.'):
    resolved = getattr(resolved, part)
  assert (type(resolved), resolved) == (type(value), value)


@each(
  'file, arguments, block',
  [
    ('plain.py', [], None),
    ('plain.py', ['--config.model.ngram.dim=4'], model_config.NGramConfig(dim=4)),
    (
      'plain.py',
      ['--config.model.ngram.clusters', 'None', '--config.model.ngram.prenormalize'],
      model_config.NGramConfig(clusters=None, prenormalize=True),
    ),
    ('ngram.py', ['--config.model.ngram.heads=2'], model_config.NGramConfig(dim=4, heads=2)),
    ('ngram.py', ['--config.model.ngram=None'], None),
    (
      'ngram.py',
      ['--config.model.ngram=None', '--config.model.ngram.heads=2'],
      model_config.NGramConfig(heads=2),
    ),
    ('ngram.py', ['--config.model.ngram.dim=2', '--config.model.ngram=None'], None),
  ],
)
def test_block_is_made_changed_and_removed(parse, file, arguments, block):
  assert parse(*arguments, file=file).model.ngram == block


@each('name', ['palin', 'quickstart'])  # the second is a config of the package
def test_missing_file_lists_those_beside_it(folder, name):
  with bad_input(
    f'--config={folder}/{name}.py: no file {folder}/{name}.py; available: '
    f'{folder}/ngram.py, {folder}/plain.py, {folder}/variants.py'
  ):
    command_line.load_file(f'{folder}/{name}.py')


@each('spec', ['none/plain.py', 'none/plain.py:variant'])
def test_missing_folder_has_nothing_to_list(folder, spec):
  with bad_input(f'--config={folder}/{spec}: no file {folder}/none/plain.py'):
    command_line.load_file(f'{folder}/{spec}')


def test_folder_is_no_file(folder):
  (folder / 'configs').mkdir()
  with bad_input(
    f'--config={folder}/configs: no file {folder}/configs; available: '
    f'{folder}/ngram.py, {folder}/plain.py, {folder}/variants.py'
  ):
    command_line.load_file(f'{folder}/configs')


@each(
  'spec, message',
  [
    ('variants.py:medium', 'no variant medium; available: small, large'),
    ('plain.py:small', '{folder}/plain.py has no variants; omit ":small"'),
    ('other.py', '{folder}/other.py has no get_config()'),
  ],
)
def test_unknown_variant_or_other_file_is_named(folder, spec, message):
  (folder / 'other.py').write_text('x = 1')
  with bad_input(f'--config={folder}/{spec}: {message.format(folder=folder)}'):
    command_line.load_file(f'{folder}/{spec}')


def test_a_config_file_that_fails_or_exits_is_named(folder):
  for error in ('ValueError', 'SystemExit'):
    (folder / 'other.py').write_text(f'raise {error}(0)')
    with bad_input(f'--config={folder}/other.py: it fails: {error}: 0; correct the file'):
      command_line.load_file(f'{folder}/other.py')


def test_config_is_required(capsys):
  with pytest.raises(SystemExit) as caught:
    command_line.parse(argparse.ArgumentParser(prog='subcommand'), [])
  assert caught.value.code == 2
  assert capsys.readouterr().err.endswith(
    'subcommand: error: the following arguments are required: --config\n'
  )


def test_key_in_place_of_a_value_is_not_swallowed(parse):
  with pytest.raises(errors.BadInput, match='^--config.training.steps needs a value'):
    parse('--config.training.steps', '--config.seed=1')


def test_print_config_prints_every_key_with_its_comment_and_stops(folder, capsys):
  parser = argparse.ArgumentParser()
  parser.add_argument('--workdir', required=True)  # but not with --print_config
  arguments = [f'--config={folder}/ngram.py', '--config.seed=9', '--print_config']
  with pytest.raises(SystemExit) as caught:
    command_line.parse(parser, arguments)
  assert caught.value.code == 0
  lines = capsys.readouterr().out.splitlines()
  expected = fields.walk_values(config.resolve(command_line.load_file(f'{folder}/ngram.py')))
  assert [line.split('=')[0] for line in lines] == [key.path for key, _ in expected]
  split = dict(map(str.strip, line.split('  #')) for line in lines)
  assert split['seed=9'] == 'random seed'
  assert split['model.ngram.dim=4'] == 'width of an n-gram vector'
  assert split["optimizer.algorithm='adam'"].endswith(' (adam, adamw, lamb, adagrad, muon)')
  decaying = '; only for algorithm adam, adamw, lamb, muon'
  assert split['optimizer.weight_decay=0.0'].endswith(decaying)


def test_print_config_refuses_what_training_refuses_and_shows_it(folder, capsys):
  arguments = [f'--config={folder}/plain.py', '--config.model.width=0', '--print_config']
  with bad_input('model.width=0 must be at least 1'):
    command_line.parse(argparse.ArgumentParser(), arguments)
  assert '\nmodel.width=0 ' in capsys.readouterr().out


@each('path, value, default', [('model.span.reserve', 8, 16), ('model.span.check_every', 20, 100)])
def test_a_key_without_effect_is_reported_once(parse, folder, caplog, path, value, default):
  spans = ('--config.model.memory.same_length=memory_alone', '--config.model.span.limit=128')
  with_key = parse(*spans, f'--config.{path}={value}')
  (warning,) = [record for record in caplog.records if record.levelname == 'WARNING']
  assert warning.getMessage() == f'{path} is no longer used'
  caplog.clear()
  assert parse(*spans, f'--config.{path}={default}') == parse(*spans)
  config.save(with_key, folder / 'config.json')
  assert config.load(folder / 'config.json') == with_key  # a stored config logs no warning
  assert not caplog.records
  assert not list(config.differences(parse(*spans), with_key))


def test_processes_are_joined_once_and_before_a_model_is_read(monkeypatch, tmp_path):
  calls = []
  monkeypatch.setattr(init_from, 'complete', lambda *_: calls.append('model'))
  parser = argparse.ArgumentParser()
  argv = ['--config=quickstart', f'--config.init_from={tmp_path}']
  argv.append('--config.model.persistent.vectors=3')
  command_line.parse(parser, argv, lambda flags: calls.append(flags.config))
  assert calls == ['quickstart', 'model']
