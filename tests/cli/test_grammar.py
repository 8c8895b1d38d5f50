"""What people who come from other programs type: each is taken as meant, or answered by what to type."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from trainer.cli.dialects.interpreter import meaning
from trainer.cli.dialects.meaning import CommandLine
from trainer.cli.dialects.other_values import OTHER_VALUES, SMALLEST
from trainer.cli.grammar import program, read
from trainer.cli.known_keys import COMMAND_WORDS
from trainer.commands.compare.entries import entries, parse_modes, parse_sweep
from trainer.errors import RecipeError
from trainer.processes import family
from trainer.recipe import flatten, load, shipped_recipes
from trainer.recipe.checks import check_processes
from trainer.recipe.known_names import check_names, torchvision_classifiers
from trainer.recipe.recipe_files import split_words
from trainer.recipe.search_space import dimension
from trainer.recipe.text import typed as as_typed

TRAIN = "python -m trainer"

# Typed, and the words that it is taken as: where dashes and blanks are all that differs from key=value.
TAKEN = {
    "recipe=digits": "recipe=digits",
    "train recipe=digits": "recipe=digits",
    "--recipe=digits": "recipe=digits",
    "--recipe resnet50": "recipe=resnet50",
    "-recipe digits": "recipe=digits",
    "recipe = digits": "recipe=digits",
    "recipe= digits": "recipe=digits",
    "recipe =digits": "recipe=digits",
    "recipe=digits --batch_size 64": "recipe=digits batch_size=64",
    "recipe=digits batch-size=64": "recipe=digits batch_size=64",
    "recipe=digits --batch-size=64": "recipe=digits batch_size=64",
    "recipe=digits --epochs 5": "recipe=digits epochs=5",
    "--epochs 5": "epochs=5",
    "recipe=digits --optimizer.lr 0.1": "recipe=digits optimizer.lr=0.1",
    "recipe=digits --nproc 2": "recipe=digits nproc=2",
    "recipe=digits \N{EN DASH}epochs=5": "recipe=digits epochs=5",
    "recipe=digits 'devices=[cuda:0, cuda:1]'": "recipe=digits 'devices=[cuda:0, cuda:1]'",
    "recipe=digits data.root=/a/b=c": "recipe=digits data.root=/a/b=c",
    "recipe=digits optimizer.norm_weight_decay=0": "recipe=digits optimizer.norm_weight_decay=0",
    "recipe=digits model.name=my_net plugin=mine": "recipe=digits model.name=my_net plugin=mine",
    "plugin=mine model.name=ResNet_18 task.name=bce": "plugin=mine model.name=ResNet_18 task.name=bce",
    "recipe=digits optimizer.lr=1e-3 ema=null": "recipe=digits optimizer.lr=1e-3 ema=null",
    "recipe=digits 'optimizer={lr: 0.1}'": "recipe=digits 'optimizer={lr: 0.1}'",
    "recipe=digits logging.wandb=my_project": "recipe=digits logging.wandb=my_project",
    "recipe=digits model.freeze=-1 data.workers=0": "recipe=digits model.freeze=-1 data.workers=0",
    "recipe=digits optimizer.lr=.1 schedule.min_lr=1E-4": "recipe=digits optimizer.lr=.1 schedule.min_lr=1E-4",
    "recipe=digits pipeline.microbatches=auto": "recipe=digits pipeline.microbatches=auto",
    "recipe=digits 'epochs=3\r'": "recipe=digits epochs=3",  # a script that Windows wrote
    "recipe=digits '\r'": "recipe=digits",
    "recipe=digits , epochs=3": "recipe=digits epochs=3",
    "--nproc 4": "nproc=4",
    "recipe=digits epochs=1 seed=2 epochs=1": "recipe=digits epochs=1 seed=2",  # the same again
    "recipe=digits --epochs 1 recipe=digits epochs=1": "recipe=digits epochs=1",
    "recipe=digits epochs=1 epochs=2": "recipe=digits epochs=1 epochs=2",  # the recipe tells it
    "recipe=": "recipe=",
    "recipe= epochs=5": "recipe= epochs=5",
}

# Typed, and the words of the command that the answer tells to type.
TOLD = {
    # commands
    "recipe resnet50": "recipe=resnet50",
    "digits": "recipe=digits",
    "train digits": "recipe=digits",
    "list": "recipes",
    "ls": "recipes",
    "--list": "recipes",
    "recipe=digits --list-models": "recipes",
    "plan": "plan recipe=digits",
    "train": "recipe=digits",
    "compare": "compare recipe=digits",
    "predict": "predict photo.jpg",
    "evaluate": "evaluate checkpoint=RUN",
    "python trainer/training.py": "recipe=digits",
    "train.py": "recipe=digits",
    "main.py recipe=digits": "recipe=digits",
    "python train.py --lr 0.1 --epochs 5": "optimizer.lr=0.1 epochs=5",
    "python -m trainer recipe=digits": "recipe=digits",
    "python -m trainer plan recipe=digits": "plan recipe=digits",
    "torchrun --nproc_per_node=2 -m trainer recipe=digits": "nproc=2 recipe=digits",
    "accelerate launch train.py recipe=digits": "recipe=digits",
    "val": "evaluate checkpoint=RUN",
    "test": "evaluate checkpoint=RUN",
    "eval checkpoint=runs/x": "evaluate checkpoint=runs/x",
    "validate": "evaluate checkpoint=RUN",
    "recipe=digits --test-only": "evaluate checkpoint=RUN",
    "--evaluate recipe=digits checkpoint=runs/x": "evaluate checkpoint=runs/x",
    "evaluate runs/foo": "evaluate checkpoint=runs/foo",
    "detect": "predict photo.jpg",
    "infer checkpoint=runs/x data.root=cat.jpg": "predict checkpoint=runs/x data.root=cat.jpg",
    "predict checkpoint=runs/x 5": "predict photo.jpg checkpoint=runs/x",
    "predict checkpoint=runs/x source=cat.jpg": "predict checkpoint=runs/x data.root=cat.jpg",
    "fit recipe=digits": "recipe=digits",
    "Train recipe=digits": "recipe=digits",
    "benchmark recipe=digits": "compare recipe=digits",
    "compare single ddp recipe=digits": "compare 'modes=[single,ddp]' recipe=digits",
    "compare recipe=digits modes=single,ddp": "compare recipe=digits 'modes=[single,ddp]'",
    "compare recipe=digits mode=single,ddp": "compare recipe=digits 'modes=[single,ddp]'",
    "sweep": "sweep recipe=digits 'optimizer.lr=[0.01,0.1]'",
    "tune": "sweep recipe=digits 'optimizer.lr=[0.01,0.1]'",
    "sweep recipe=digits lr=[0.1,0.2] epoch=3": "sweep recipe=digits 'optimizer.lr=[0.1,0.2]' epochs=3",
    "sweep recipe=digits optimizer.lr=0.1,0.2 --bs 32..64": (
        "sweep recipe=digits 'optimizer.lr=[0.1,0.2]' batch_size=32..64"
    ),
    "train.py --multirun optimizer.lr=0.1,0.2 recipe=digits": "sweep 'optimizer.lr=[0.1,0.2]' recipe=digits",
    "--dry-run recipe=digits": "plan recipe=digits",
    "plan resnet50": "plan recipe=resnet50",
    "info": "doctor",
    "env": "doctor",
    "resume": "recipe=RUN output=RUN resume=auto",
    "onnx": "export RUN format=onnx",
    "onnx runs/x": "export runs/x format=onnx",
    "torchscript": "export RUN format=torchscript",
    "-m trainer": "recipe=digits",
    "-m trainer plan recipe=digits": "plan recipe=digits",
    ".\\\\launch.sh recipe=digits": "recipe=digits",
    "recipe": "recipe=digits",
    "train --recipe": "recipe=digits",
    "train --digits": "recipe=digits",
    "digits 10": "recipe=digits",
    "digits ddp": "recipe=digits mode=ddp",
    "digits foo=1": "recipe=digits",
    "plan resnet50 gpus=8": "plan recipe=resnet50 nproc=8",
    "compare recipe=digits ddp,pipeline": "compare recipe=digits 'modes=[ddp,pipeline]'",
    "compare recipe=digits --modes single ddp": "compare recipe=digits 'modes=[single,ddp]'",
    "compare recipe=digits modes=all": "compare recipe=digits",
    "predict model=runs/x data.root=photos": "predict checkpoint=runs/x data.root=photos",
    "predict checkpoint=runs/x input=photos": "predict checkpoint=runs/x data.root=photos",
    "evaluate weights=runs/x/best.safetensors": "evaluate checkpoint=runs/x/best.safetensors",
    "bash": "completion bash",
    "usage": "help",
    # how a word is set
    "recipe=digits optimizer.lr 0.1": "recipe=digits optimizer.lr=0.1",
    "recipe=digits lr 0.1": "recipe=digits optimizer.lr=0.1",
    "recipe=digits epochs: 5": "recipe=digits epochs=5",
    "recipe=digits epochs:5": "recipe=digits epochs=5",
    "recipe=digits epochs==5": "recipe=digits epochs=5",
    "recipe=digits epochs=5,": "recipe=digits epochs=5",
    "recipe=digits EPOCHS=5": "recipe=digits epochs=5",
    "recipe=digits +epochs=5": "recipe=digits epochs=5",
    "recipe=digits ++trainer.max_epochs=5": "recipe=digits epochs=5",
    "recipe=digits --epochs": "recipe=digits epochs=10",
    "recipe=digits optimizer.lr=0,1": "recipe=digits optimizer.lr=0.1",
    "recipe=digits \N{LEFT DOUBLE QUOTATION MARK}mode=ddp\N{RIGHT DOUBLE QUOTATION MARK}": "recipe=digits mode=ddp",
    "recipe=digits --compile": "recipe=digits compile=true",
    "recipe=digits --no-compile": "recipe=digits compile=false",
    "recipe=digits compile=1": "recipe=digits compile=true",
    "recipe=digits clip_grad_norm=none": "recipe=digits clip_grad_norm=null",
    "recipe=digits ema=true": "recipe=digits ema=0.999",
    "recipe=digits 'epochs=3,lr=0.1'": "recipe=digits epochs=3 optimizer.lr=0.1",
    "recipe=digits,epochs=3": "recipe=digits epochs=3",
    "recipe=digits;epochs=3": "recipe=digits epochs=3",
    "'recipe=digits epochs=3'": "recipe=digits epochs=3",
    "recipe=digits, epochs=3": "recipe=digits epochs=3",
    "recipe=digits '\"epochs=3\"'": "recipe=digits epochs=3",
    "recipe=digits optimizer:lr=0.1": "recipe=digits optimizer.lr=0.1",
    "recipe=digits optimizer/lr=0.1": "recipe=digits optimizer.lr=0.1",
    "recipe=digits optimizer[lr]=0.1": "recipe=digits optimizer.lr=0.1",
    "recipe=digits optimizer__lr=0.1": "recipe=digits optimizer.lr=0.1",
    "/recipe=digits": "recipe=digits",
    "recipe=digits --config mnist": "recipe=mnist",
    # numbers
    "recipe=digits epochs=1e2": "recipe=digits epochs=100",
    "recipe=digits epochs=3.0": "recipe=digits epochs=3",
    "recipe=digits epochs=1,000": "recipe=digits epochs=1000",
    "recipe=digits batch_size=1k": "recipe=digits batch_size=1000",
    "recipe=digits \"epochs='3'\"": "recipe=digits epochs=3",
    "recipe=digits lr=1e-1": "recipe=digits optimizer.lr=1e-1",
    "recipe=digits lr=auto": "recipe=digits",
    "recipe=digits lr=1e\N{EN DASH}4": "recipe=digits optimizer.lr=1e-4",
    "recipe=digits label_smoothing=10%": "recipe=digits loss.label_smoothing=0.1",
    "recipe=digits imgsz=224x224": "recipe=digits data.image_size=224",
    "recipe=digits data.image_size=224,224": "recipe=digits data.image_size=224",
    "recipe=digits timeout=30s": "recipe=digits timeout=30",
    "optimizer.name=adam betas=0.9,0.999": "optimizer.name=adam 'optimizer.betas=[0.9,0.999]'",
    "recipe=digits 'data.mean=(0.5, 0.5, 0.5)'": "recipe=digits 'data.mean=[0.5,0.5,0.5]'",
    "recipe=digits data.std=[0.5 0.5 0.5]": "recipe=digits 'data.std=[0.5,0.5,0.5]'",
    "recipe=digits workers=auto": "recipe=digits data.workers=auto",
    "recipe=digits max_steps=-1": "recipe=digits max_steps=null",
    "recipe=digits clip_grad=0": "recipe=digits clip_grad_norm=null",
    "recipe=digits optimizer.norm_weight_decay=false": "recipe=digits optimizer.norm_weight_decay=0",
    "recipe=digits optimizer.norm_weight_decay=None": "recipe=digits optimizer.norm_weight_decay=null",
    "recipe=digits --mixup": "recipe=digits augment.mixup=0.2",
    "recipe=digits mixup=false": "recipe=digits augment.mixup=0",
    "recipe=digits freeze=true": "recipe=digits model.freeze=-1",
    "recipe=digits early_stopping=3": "recipe=digits stop.patience=3",
    "-n 4": "nproc=4",
    "recipe=digits -np 4": "recipe=digits nproc=4",
    "recipe=digits nproc=auto": "recipe=digits",
    "recipe=digits -j4": "recipe=digits data.workers=4",
    "recipe=digits -b64": "recipe=digits batch_size=64",
    # recipes
    "recipe=imagenet": "recipe=resnet50 data.root=/path/to/imagenet",
    "recipe=vgg11": "recipe=resnet50 model.name=vgg11",
    "recipe=vit_tiny": "recipe=digits model.name=vit_tiny",
    "recipe=./digits.yml": "recipe=digits",
    "recipe=configs/digits.yaml": "recipe=digits",
    "recipe=CIFAR10": "recipe=cifar10",
    "recipe=cifar-10": "recipe=cifar10",
    "recipe=cifar": "recipe=cifar10",
    "recipe=ddp": "recipe=digits mode=ddp",
    "recipe=photos": "recipe=finetune data.root=FOLDER",
    "--config digits": "recipe=digits",
    "--config-name=digits": "recipe=digits",
    "-c digits.yaml": "recipe=digits",
    # training
    "recipe=digits --lr=0.1": "recipe=digits optimizer.lr=0.1",
    "recipe=digits lr0=0.1": "recipe=digits optimizer.lr=0.1",
    "recipe=digits learning_rate=0.1": "recipe=digits optimizer.lr=0.1",
    "recipe=digits batch=64": "recipe=digits batch_size=64",
    "recipe=digits --per-device-train-batch-size 64": "recipe=digits",
    "recipe=digits max_epochs=5": "recipe=digits epochs=5",
    "recipe=digits trainer.max_epochs=5": "recipe=digits epochs=5",
    "recipe=digits num_train_epochs=5": "recipe=digits epochs=5",
    "recipe=digits steps=100": "recipe=digits max_steps=100",
    "recipe=digits optimizer=adam": "recipe=digits optimizer.name=adam",
    "recipe=digits optimizer=AdamW": "recipe=digits optimizer.name=adamw",
    "recipe=digits --opt adamw --sched cosine": "recipe=digits optimizer.name=adamw schedule.name=cosine",
    "recipe=digits scheduler=StepLR": "recipe=digits schedule.name=step",
    "recipe=digits --wd 1e-4": "recipe=digits optimizer.weight_decay=1e-4",
    "recipe=digits weight_decay=1e-4": "recipe=digits optimizer.weight_decay=1e-4",
    "recipe=digits warmup_epochs=3": "recipe=digits schedule.warmup_epochs=3",
    "recipe=digits label-smoothing=0.1": "recipe=digits loss.label_smoothing=0.1",
    "recipe=digits gradient_accumulation_steps=4": "recipe=digits accumulate=4",
    "recipe=digits accumulate_grad_batches=4": "recipe=digits accumulate=4",
    "recipe=digits max_grad_norm=1": "recipe=digits clip_grad_norm=1",
    "recipe=digits loss=bce": "recipe=digits task.name=multilabel",
    "recipe=digits task=classify": "recipe=digits task.name=classification",
    "recipe=digits freeze=3": "recipe=digits model.freeze=3",
    "recipe=digits freeze=0": "recipe=digits model.freeze=null",
    "recipe=digits freeze_backbone=true": "recipe=digits model.freeze=-1",
    "recipe=digits --patience 5": "recipe=digits stop.patience=5",
    "recipe=digits patience=0": "recipe=digits stop.patience=null",
    "recipe=digits --early-stopping": "recipe=digits stop.patience=5",
    "recipe=digits stop=3": "recipe=digits stop.patience=3",
    "recipe=digits --layer-decay 0.75": "recipe=digits optimizer.layer_decay=0.75",
    "recipe=digits --lr-base-size 256": "recipe=digits optimizer.lr_per=256",
    "recipe=digits scale_lr=true": "recipe=digits optimizer.lr_per=256",
    "recipe=digits --resume": "recipe=digits resume=auto",
    "recipe=digits resume=true": "recipe=digits resume=auto",
    "recipe=digits resume=runs/foo": "recipe=digits output=runs/foo resume=auto",
    "resume=runs/foo": "recipe=runs/foo output=runs/foo resume=auto",
    "recipe=digits --output-dir runs/x": "recipe=digits output=runs/x",
    "recipe=digits log_every_n_steps=5": "recipe=digits logging.every_steps=5",
    "recipe=digits seed_everything=1": "recipe=digits seed=1",
    "recipe=digits save_top_k=3": "recipe=digits save.keep=3",
    "recipe=digits save=false": "recipe=digits save.every_epochs=null",
    "recipe=digits logging=false": "recipe=digits logging.tensorboard=false",
    "recipe=digits logger=wandb": "recipe=digits logging.wandb=true",
    "recipe=digits augment=false": "recipe=digits augment.auto=none",
    "recipe=digits name=first": "recipe=digits output=runs/first",
    "recipe=digits optimizer=lion": "recipe=digits",
    "recipe=digits scheduler=plateau": "recipe=digits",
    "recipe=digits val=false": "recipe=digits",
    "recipe=digits dropout=0.5": "recipe=digits",
    "recipe=digits backend=nccl": "recipe=digits",
    "recipe=digits resume": "recipe=digits resume=auto",
    "recipe=digits resume=runs/x/last.safetensors": "recipe=digits output=runs/x resume=auto",
    "recipe=digits ckpt=runs/x": "recipe=digits",
    # models and data
    "recipe=digits model=resnet18": "recipe=digits model.name=resnet18",
    "recipe=digits -a resnet18": "recipe=digits model.name=resnet18",
    "recipe=digits --arch=resnet18": "recipe=digits model.name=resnet18",
    "recipe=digits model=resnet50.pt": "recipe=digits model.name=resnet50 model.weights=DEFAULT",
    "recipe=digits model=runs/x/last.safetensors": "recipe=digits model.init_from=runs/x/last.safetensors",
    "recipe=digits model.name=ResNet-50": "recipe=digits model.name=resnet50",
    "recipe=digits --pretrained": "recipe=digits model.weights=DEFAULT",
    "recipe=digits pretrained=false": "recipe=digits model.weights=null",
    "recipe=digits weights=best.pth": "recipe=digits model.init_from=best.pth",
    "recipe=digits data=photos": "recipe=digits data.name=imagefolder data.root=photos",
    "recipe=finetune data=photos": "recipe=finetune data.root=photos",
    "recipe=finetune data=x/a.tar": "recipe=finetune data.name=shards data.root=x/a.tar",
    "recipe=finetune data.name=webdataset data.root=x": "recipe=finetune data.name=shards data.root=x",
    "recipe=finetune x/a.tar": "recipe=finetune data.name=shards data.root=x/a.tar",
    "recipe=finetune x/a.tar x/b.tar": "recipe=finetune data.name=shards 'data.root=x/*.tar'",
    "recipe=finetune data.root=x/a.tar x/b.tar": "recipe=finetune 'data.root=x/*.tar' data.name=shards",
    "recipe=finetune --data-path photos": "recipe=finetune data.root=photos",
    "recipe=digits dataset=cifar10": "recipe=digits data.name=cifar10",
    "recipe=digits data.name=CIFAR-10": "recipe=digits data.name=cifar10",
    "recipe=digits data=imagenet": "recipe=digits data.name=imagefolder data.root=/path/to/imagenet",
    "recipe=digits imgsz=224": "recipe=digits data.image_size=224",
    "recipe=digits num_workers=4": "recipe=digits data.workers=4",
    "recipe=digits -j 4": "recipe=digits data.workers=4",
    "recipe=digits model=timm/resnet50": "recipe=digits model.name=timm:resnet50",
    "recipe=digits val_split=0.1": "recipe=digits data.val_fraction=0.1",
    "recipe=digits channels=rgb": "recipe=digits data.channels=3",
    "recipe=digits mixup_alpha=0.2 auto_augment=ra": "recipe=digits augment.mixup=0.2 augment.auto=rand",
    # devices, modes, precision
    "recipe=digits devices=0,1": "recipe=digits 'devices=[cuda:0,cuda:1]'",
    "recipe=digits devices=[0,1]": "recipe=digits 'devices=[cuda:0,cuda:1]'",
    "recipe=digits devices=[cuda:0, cuda:1]": "recipe=digits 'devices=[cuda:0,cuda:1]'",
    "recipe=digits devices=cuda:0-2": "recipe=digits 'devices=[cuda:0,cuda:1,cuda:2]'",
    "recipe=digits devices=gpu:0": "recipe=digits 'devices=[cuda:0]'",
    "recipe=digits devices=cuda": "recipe=digits devices=auto",
    "recipe=digits gpu=0": "recipe=digits 'devices=[cuda:0]'",
    "recipe=digits device=mps": "recipe=digits 'devices=[cpu]'",
    "recipe=digits CUDA_VISIBLE_DEVICES=0,1": "recipe=digits 'devices=[cuda:0,cuda:1]'",
    "recipe=digits cpu": "recipe=digits 'devices=[cpu]'",
    "recipe=digits cuda:1": "recipe=digits 'devices=[cuda:1]'",
    "recipe=digits fp16": "recipe=digits precision=fp16",
    "recipe=digits compile": "recipe=digits compile=true",
    "recipe=digits --ddp": "recipe=digits mode=ddp",
    "recipe=digits --distributed": "recipe=digits mode=ddp",
    "recipe=digits devices=2": "recipe=digits nproc=2",
    "recipe=digits gpus=2": "recipe=digits nproc=2",
    "recipe=digits --gpus 0,1": "recipe=digits 'devices=[cuda:0,cuda:1]'",
    "recipe=digits mode=dp gpus=2": "recipe=digits mode=dp 'devices=[cuda:0,cuda:1]'",
    "recipe=digits device=0": "recipe=digits 'devices=[cuda:0]'",
    "recipe=digits device=cpu": "recipe=digits 'devices=[cpu]'",
    "recipe=digits --device cuda:1": "recipe=digits 'devices=[cuda:1]'",
    "recipe=digits --device cuda": "recipe=digits devices=auto",
    "recipe=digits devices=-1": "recipe=digits devices=auto",
    "recipe=digits devices=mps": "recipe=digits 'devices=[cpu]'",
    "recipe=digits accelerator=gpu": "recipe=digits devices=auto",
    "recipe=digits --cpu": "recipe=digits 'devices=[cpu]'",
    "recipe=digits --no-cuda": "recipe=digits 'devices=[cpu]'",
    "recipe=digits --nproc_per_node=2": "recipe=digits nproc=2",
    "recipe=digits --local-rank=0": "recipe=digits",
    "recipe=digits --verbose": "recipe=digits",
    "recipe=digits mode=DataParallel": "recipe=digits mode=dp",
    "recipe=digits mode=DDP": "recipe=digits mode=ddp",
    "recipe=digits mode=model_parallel": "recipe=digits mode=split",
    "recipe=digits mode=gpipe": "recipe=digits mode=pipeline pipeline.schedule=gpipe",
    "recipe=digits mode=local-sgd": "recipe=digits mode=local_sgd",
    "recipe=digits strategy=ddp": "recipe=digits mode=ddp",
    "recipe=digits pipeline=1f1b": "recipe=digits pipeline.schedule=1f1b",
    "recipe=digits precision=amp": "recipe=digits precision=bf16",
    "recipe=digits precision=16-mixed": "recipe=digits precision=fp16",
    "recipe=digits precision=32": "recipe=digits precision=fp32",
    "recipe=digits --amp": "recipe=digits precision=bf16",
    "recipe=digits amp=true": "recipe=digits precision=bf16",
    "recipe=digits amp=false": "recipe=digits precision=fp32",
    "recipe=digits --fp16": "recipe=digits precision=fp16",
    "recipe=digits mixed_precision=fp16": "recipe=digits precision=fp16",
    # more of Lightning, Accelerate, timm, Ultralytics, Keras and Hugging Face's TrainingArguments
    "recipe=digits checkpoint.steps=10": "recipe=digits save.every_steps=10",
    "recipe=digits checkpoint.interval=2": "recipe=digits save.every_epochs=2",
    "recipe=digits checkpointing_steps=10": "recipe=digits save.every_steps=10",
    "recipe=digits every_n_train_steps=10": "recipe=digits save.every_steps=10",
    "recipe=digits checkpoints_total_limit=3": "recipe=digits save.keep=3",
    "recipe=digits checkpoint.dir=runs/x": "recipe=digits output=runs/x",
    "recipe=digits log.interval=10": "recipe=digits logging.every_steps=10",
    "recipe=digits logging.steps=10": "recipe=digits logging.every_steps=10",
    "recipe=digits early_stop=3": "recipe=digits stop.patience=3",
    "recipe=digits warmup=5": "recipe=digits",
    "recipe=digits grad_clip=1": "recipe=digits clip_grad_norm=1",
    "recipe=digits workers=4": "recipe=digits data.workers=4",
    "recipe=digits global_clipnorm=1.0": "recipe=digits clip_grad_norm=1.0",
    "recipe=digits opt=adam adam_epsilon=1e-7": "recipe=digits optimizer.name=adam optimizer.eps=1e-7",
    "optimizer.name=adamw adam_beta1=0.8": "optimizer.name=adamw 'optimizer.betas=[0.8,0.999]'",
    "optimizer.name=adamw adam_beta1=0.8 adam_beta2=0.95": "optimizer.name=adamw 'optimizer.betas=[0.8,0.95]'",
    "optimizer.name=adamw --beta2 0.95 --beta1 0.8": "optimizer.name=adamw 'optimizer.betas=[0.8,0.95]'",
    "recipe=digits beta_2=0.99 opt=adam": "recipe=digits 'optimizer.betas=[0.9,0.99]' optimizer.name=adam",
    "recipe=digits adam_beta1=0.8": "recipe=digits",  # which trains by sgd
    "recipe=digits --lr-step-size 3": "recipe=digits",
    "recipe=digits lr_step_size=3 sched=step": "recipe=digits schedule.step_epochs=3 schedule.name=step",
    "recipe=digits label_smoothing_factor=0.1": "recipe=digits loss.label_smoothing=0.1",
    "recipe=digits jit_compile=true": "recipe=digits compile=true",
    "recipe=digits use_ema=true": "recipe=digits ema=0.999",
    "recipe=digits data_seed=1": "recipe=digits seed=1",
    "recipe=digits --full_determinism": "recipe=digits deterministic=true",
    "recipe=digits --log-wandb": "recipe=digits logging.wandb=true",
    "recipe=digits log_with=mlflow": "recipe=digits logging.mlflow=true",
    "recipe=digits in_chans=1": "recipe=digits data.channels=1",
    "recipe=digits color_mode=grayscale": "recipe=digits data.channels=1",
    "recipe=digits fast_dev_run=true": "recipe=digits max_steps=1",
    "recipe=digits trainer.limit_train_batches=10": "recipe=digits max_steps=10",
    "recipe=digits args.lr=0.1 training.batch_size=32": "recipe=digits optimizer.lr=0.1 batch_size=32",
    "recipe=digits disable_tqdm=true": "recipe=digits logging.progress=false",
    "recipe=digits --deepspeed ds.json": "recipe=digits mode=fsdp",
    "recipe=digits --use_fsdp": "recipe=digits mode=fsdp",
    "recipe=digits mode=fully-sharded": "recipe=digits mode=fsdp",
    "recipe=digits use_fsdp=false": "recipe=digits",
    "recipe=digits val.every=1": "recipe=digits",
    "recipe=digits eval_strategy=epoch": "recipe=digits",
    "recipe=digits check_val_every_n_epoch=1": "recipe=digits",
    "recipe=digits num_sanity_val_steps=0": "recipe=digits",
    "recipe=digits per_device_eval_batch_size=8": "recipe=digits",
    "recipe=digits load_best_model_at_end=true": "recipe=digits",
    "recipe=digits gradient_clip_algorithm=norm": "recipe=digits",
    "recipe=digits initial_epoch=3": "recipe=digits",
    "recipe=digits ddp_find_unused_parameters=false": "recipe=digits",
    "recipe=digits flipud=0.5": "recipe=digits",
    # what would mean something else here
    "recipe=digits schedule.warmup_epochs=10%": "recipe=digits",
    "recipe=digits epochs=5 warmup=10%": "recipe=digits epochs=5",
    "recipe=digits --input-size 3 224 224": "recipe=digits data.image_size=224 data.channels=3",
    "recipe=digits --img-size 224 224": "recipe=digits data.image_size=224",
    "recipe=digits input_size=224,224,3": "recipe=digits data.image_size=224 data.channels=3",
    "recipe=digits imgsz=224x320": "recipe=digits",
    "recipe=digits --input-size 640 480": "recipe=digits",
    "recipe=digits imgsz=640,480": "recipe=digits",
    "recipe=digits imgsz=[3,640,480]": "recipe=digits",
    "recipe=digits 'imgsz=[224, 224]'": "recipe=digits data.image_size=224",
    "recipe=digits imgsz=1,024": "recipe=digits data.image_size=1024",
    "recipe=digits --do_train --do_eval": "recipe=digits",
    "recipe=digits --do_eval --do_train --do_predict": "recipe=digits",
    "recipe=digits --do_eval": "evaluate checkpoint=RUN",
    "recipe=digits project=p name=r": "recipe=digits output=p/r",
    "recipe=digits name=r --output-dir p/": "recipe=digits output=p/r",
    "recipe=digits --output_dir out --run_name x": "recipe=digits output=out/x",
    "recipe=digits run_name=x out=out/": "recipe=digits output=out/x",
    "recipe=digits --run_name x": "recipe=digits output=runs/x",
    "recipe=digits output=p name=r": "recipe=digits output=p/r",
    "recipe=digits --val-split val": "recipe=digits",
    "recipe=digits classes=0,1": "recipe=digits",
    "recipe=digits --model_name_or_path google/vit-base-patch16-224": "recipe=digits model.name=vit_b_16",
    "recipe=digits model.name=microsoft/resnet-50": "recipe=digits model.name=resnet50",
    "recipe=digits model.name=hf:google/vit": "recipe=digits",
    "recipe=digits --gradient_checkpointing": "recipe=digits",
    "recipe=digits --gradient_checkpointing mode=pipeline": "recipe=digits pipeline.recompute=true mode=pipeline",
    "predict checkpoint=runs/x data.root=photos save=true": "predict checkpoint=runs/x data.root=photos",
    # what was answered by a neighbour that is far away
    "recipe=digits rect=true": "recipe=digits",
    "recipe=digits rescale=1": "recipe=digits",
    "recipe=digits --plots": "recipe=digits",
    "recipe=digits --topk 5": "recipe=digits",
    "recipe=digits --bce-loss": "recipe=digits task.name=multilabel",
    "recipe=digits loss=categorical_crossentropy": "recipe=digits task.name=classification",
    "recipe=digits loss=focal": "recipe=digits",
    "recipe=digits model.name=efficientnet": "recipe=digits model.name=efficientnet_b0",
    "recipe=digits model=vgg": "recipe=digits model.name=vgg11",
    "recipe=digits model=DenseNet": "recipe=digits model.name=densenet121",
    "recipe=digits model=mobilenet-v3": "recipe=digits model.name=mobilenet_v3_small",
    "export": "export RUN format=onnx",
    "predict checkpoint=runs/x data.root=p output=out.csv": "predict checkpoint=runs/x data.root=p output=out",
    "predict checkpoint=runs/x data.root=p output=a/b.jsonl": (
        "predict checkpoint=runs/x data.root=p output=a predict.format=jsonl"
    ),
    "compare recipe=digits output=table.json": "compare recipe=digits output=table",
    # several at once
    "recipe=digits --lr=0.1 batch=64 workers=2": "recipe=digits optimizer.lr=0.1 batch_size=64 data.workers=2",
}

TOO_LONG = ("a" * 300, f"recipe=digits {'a' * 300}")  # for a file's name

# Answered by a sentence.
SAID = {
    "tensorboard": "'tensorboard' tensorboard.main --logdir runs",
    "new": "'new' python -m trainer recipes new my.yaml extends=digits",
    "recipe=digits opt=lion": "'opt=lion' optimizer.name sgd, adam, adamw muon",
    "recipe=digits --input-size 640 480": "data.image_size=640:",
    "recipe=digits imgsz=640,480": "data.image_size=640:",
    "recipe=digits data.image_size=3,224,320": "data.image_size=224:",
    "digits 10": "'10' key=value epochs=10",
    "digits epoch_size=1": "'epoch_size=1' epochs",
    "compare runs/a runs/b": f"type {TRAIN} runs compare runs/a runs/b",
    "recipe=digits nnodes=2": f"NNODES=2 NODE_RANK=0 MASTER_ADDR=HOST {TRAIN} recipe=digits",
    "recipe=digits main_process_port=1": f"type MASTER_PORT=1 {TRAIN} recipe=digits",
    "recipe=digits mode=tp": "'mode=tp' mode=fsdp",
    "recipe=digits warmup_ratio=0.1": "epochs, schedule.warmup_epochs=0.5",
    "recipe=digits --warmup_steps 500": "epochs, schedule.warmup_epochs=0.5",
    "recipe=digits epochs=x warmup=10%": "'warmup=10%' schedule.warmup_epochs= 'epochs=x'",
    "recipe=digits --do_train --do_eval": "'--do_eval' evaluation",
    "recipe=digits --val-split val": "'--val-split data.val_fraction number",
    "recipe=digits classes=0,1": "'classes=0,1' model.num_classes=0,1 integer",
    "recipe=digits model.name=hf:google/vit": "'model.name=hf:google/vit' model.name=timm:vit_base_patch16_224",
    "recipe=digits --gradient_checkpointing": "mode=split mode=pipeline pipeline.recompute=true",
    "predict checkpoint=runs/x save=true": "'save=true' output=",
    "recipe=digits loss=focal": "'loss=focal' task.name=classification",
    "export": "type python -m trainer export RUN format=onnx",
    "recipe=digits lr=0.1 learning_rate=0.2": "'lr=0.1' 'learning_rate=0.2' 'optimizer.lr'",
    "recipe=digits --config mnist": "'--config 'recipe' digits mnist",
    "recipe=digits adam_beta1=0.8": "'optimizer.betas=[0.8,0.999]' optimizer.name=sgd",
    "recipe=digits hsv_h=0.1": "'hsv_h=0.1' augment.auto=trivial",
    "recipe=digits lrf=0.01": "'lrf=0.01' schedule.min_lr=",
    "recipe=digits steps_per_epoch=10": "'steps_per_epoch=10' max_steps=",
    "recipe=digits num_machines=2": "NNODES=2 NODE_RANK=0 MASTER_ADDR=HOST",
    "recips": "'recips' recipes?",
    "rect": "'rect' train, compare, plan,",
    "digits rectangle=1": "'rectangle=1' key",
    "resnet5": "'resnet5' recipe=resnet50?",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With the one photo that an answer may name."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    Path("photo.jpg").touch()
    for name in ("RANK", "WORLD_SIZE", "TRAINER_COMMAND", family.PARENT):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("typed", TAKEN)
def test_what_is_taken_as_it_is_meant(typed: str) -> None:
    assert read(shlex.split(typed)) == ("train", shlex.split(TAKEN[typed]))


def test_a_sweep_takes_lists_and_ranges_where_training_takes_one_value() -> None:
    typed = ["recipe=digits", "--optimizer.lr", "0.01..0.1", "batch_size=[32,64]"]
    assert read(["sweep", *typed]) == ("sweep", ["recipe=digits", "optimizer.lr=0.01..0.1", "batch_size=[32,64]"])


@pytest.mark.parametrize("typed", TOLD)
def test_what_is_answered_by_what_to_type(typed: str) -> None:
    with pytest.raises(RecipeError) as error:
        read(shlex.split(typed))
    assert str(error.value).endswith(f" type {TRAIN} {TOLD[typed]}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("typed", TOLD)
def test_what_it_tells_to_type_is_taken(typed: str) -> None:
    """But for files that are not here."""
    command, words = read(shlex.split(TOLD[typed]))
    assert [*words] == [word for word in shlex.split(TOLD[typed]) if word != command]


@pytest.mark.parametrize("typed", SAID)
def test_what_is_answered_by_a_sentence(typed: str) -> None:
    with pytest.raises(RecipeError) as error:
        read(shlex.split(typed))
    assert "\n" not in str(error.value) and [name for name in SAID[typed].split() if name not in str(error.value)] == []


@pytest.mark.parametrize(
    "typed",
    ["5", "=", "--", "-", "", "[", "recipe=digits =", "--=5", "\N{SNOWMAN}", "a:b", "x=", "=x", *TOO_LONG],
)
def test_what_nobody_understands_is_passed_on_or_one_line(typed: str) -> None:
    try:
        command, words = read(shlex.split(typed) or [""])
    except RecipeError as error:
        assert "is not a command" in str(error) and "\n" not in str(error)
    else:
        assert (command, words) == ("train", shlex.split(typed))


@pytest.mark.parametrize("command", ["runs", "recipes", "doctor", "prove", "help"])
def test_commands_that_read_their_words_themselves(command: str) -> None:
    assert read([command]) == (command, [])
    assert read([command, "help"]) == ("help", [command])
    assert read(["export", "runs/x", "--format", "onnx"]) == ("export", ["runs/x", "format=onnx"])


def test_torchrun_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read([]) == ("help", [])
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=r" type torchrun --nproc_per_node=4 -m trainer recipe=digits$"):
        read([])


def test_folders_and_files_that_lie_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pets", "runs/first"):
        Path(name).mkdir(parents=True)
    for name in ("runs/first/recipe.yaml", "mine.yaml", "cat.jpg"):
        Path(name).touch()
    for typed, told in {
        "pets": "recipe=finetune data.root=pets",
        "recipe=pets": "recipe=finetune data.root=pets",
        "mine.yaml": "recipe=mine.yaml",
        "evaluate runs/first": "evaluate checkpoint=runs/first",
    }.items():
        with pytest.raises(RecipeError) as error:
            read(typed.split())
        assert str(error.value).endswith(f"type {TRAIN} {told}"), typed
    assert read(["recipe=runs/first"]) == ("train", ["recipe=runs/first"])


def test_predict_takes_photos_folders_and_a_run_in_any_order() -> None:
    for name in ("runs/first/recipe.yaml", "photos/cat.jpg", "data/1.jpg", "x #1.png", "a b.jpg", "lr=3.jpg", "w.pth"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    for typed, taken in {
        "photo.jpg": "photo.jpg",
        "photos runs/first": "photos checkpoint=runs/first",
        "runs/first photos photo.jpg": "checkpoint=runs/first photos photo.jpg",
        "photo.jpg first": "photo.jpg checkpoint=first",
        "data photos": "data photos",
        "'x #1.png' 'a b.jpg' lr=3.jpg": "'x #1.png' 'a b.jpg' ./lr=3.jpg",
        "w.pth photo.jpg threads=1": "checkpoint=w.pth photo.jpg threads=1",
        "- runs/first": "- checkpoint=runs/first",
        "--output photos photo.jpg": "output=photos photo.jpg",
        "photo.jpg data.root=photos": "photo.jpg data.root=photos",
    }.items():
        assert read(["predict", *shlex.split(typed)]) == ("predict", shlex.split(taken)), typed


def test_what_predict_cannot_tell_apart_is_asked() -> None:
    for name in ("runs/first/recipe.yaml", "runs/other/recipe.yaml", "other/1.jpg", "cats.jpg"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("runs/first/1.jpg").touch()
    for typed, says in {
        "runs/first": "checkpoint=runs/first data.root=runs/first",
        "other": "./other runs/other",
        "runs/other first photo.jpg": "runs/other first both",
        "cat.jpg": "cats.jpg",
        "runs/othr photo.jpg": "runs/other",
        "precison photo.jpg": "'precison' precision",
        "nothing": "'nothing'",
    }.items():
        with pytest.raises(RecipeError) as error:
            read(["predict", *typed.split()])
        assert "\n" not in str(error.value) and " type " in str(error.value)
        assert [word for word in says.split() if word not in str(error.value)] == [], (typed, str(error.value))


def test_a_recipe_of_every_name_is_taken() -> None:
    for name in shipped_recipes():
        assert read([f"recipe={name}"]) == ("train", [f"recipe={name}"])


@pytest.mark.parametrize("name", shipped_recipes())
def test_what_a_recipe_says_itself_is_never_corrected(name: str) -> None:
    words = [f"{key}={as_typed(value)}" for key, value in flatten(load(name).to_dict()).items()]
    assert read(words) == ("train", words)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "python -m trainer"),
        ({"TRAINER_COMMAND": "./launch.sh"}, "./launch.sh"),
        ({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "torchrun --nproc_per_node=4 -m trainer"),
        ({"RANK": "0", "WORLD_SIZE": "8", family.PARENT: "5"}, "python -m trainer"),
    ],
)
def test_what_to_type_begins_as_the_user_did(environment: dict[str, str], expected: str) -> None:
    assert program(environment) == expected


def test_a_warm_up_in_steps_is_no_key_of_the_speed() -> None:
    with pytest.raises(RecipeError, match=r"\bschedule\.warmup_epochs"):
        load({"warmup_steps": 500})
    with pytest.raises(RecipeError, match=r"\bschedule__warmup_epochs"):
        load("digits", warmup_steps=500)


def test_the_same_line_follows_from_the_same_words_each_time() -> None:
    unread = ["schedule.gamma=0.3", "optimizer.trust=0.01", "optimizer.nesterov=true", "schedule.step_epochs=2"]
    with pytest.raises(RecipeError) as error:
        read(["recipe=digits", "opt=adamw", "schedule.name=cosine", "optimizer.momentum=0.8", *unread])
    left_out = re.findall(r"'([\w.]+)=[^']*': ", str(error.value))
    assert left_out == sorted(left_out) and len(left_out) == 5


def test_a_data_set_that_was_typed_needs_no_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.cli.dialects.meaning.load", lambda _: pytest.fail("the recipe was loaded"))
    assert (
        CommandLine("train", COMMAND_WORDS["train"], {"recipe": "digits", "data.name": "shards"}).data_name == "shards"
    )


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_what_a_row_says_is_taken(name: str) -> None:
    """Words of ours, or a sentence; but for a value that only the typed one can tell."""
    command, _, name = name.rpartition(":")
    line = CommandLine(command or "train", COMMAND_WORDS[command or "train"])
    for value in OTHER_VALUES[f"{command}:{name}" if command else name]:
        found = meaning(name, "1" if value == "*" else value, line)
        if found is not None and found.words:
            assert read([line.command, *found.words]) == (line.command, [*found.words]), (name, value)
        assert found is None or found.words or found.note


def test_the_recipe_is_read_once_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    read_recipes: list[object] = []
    monkeypatch.setattr("trainer.cli.dialects.meaning.load", lambda name: (read_recipes.append(name), load(name))[1])
    with pytest.raises(RecipeError, match=r"optimizer\.eps=1e-7.*optimizer\.name=sgd"):
        read(["recipe=digits", "data=photos", "--gradient_checkpointing", "adam_beta1=0.8", "optimizer.eps=1e-7"])
    assert read_recipes == ["digits"]


def test_a_model_of_a_folder_starts_from_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/first").mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"type python -m trainer recipe=digits model\.init_from=runs/first$"):
        read(["recipe=digits", "model=runs/first"])


def test_several_images_or_folders_want_the_one_that_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ph/cat/0.jpg", "ph/cat/1.jpg", "ph/dog/0.jpg", "else/cow/0.jpg", "runs/x/recipe.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    for typed, told in {
        "recipe=finetune data.root=ph/cat ph/dog": "recipe=finetune data.root=FOLDER",
        "recipe=finetune ph/dog data.root=ph/cat": "recipe=finetune data.root=FOLDER",
        "ph/cat/ ph/dog/": "recipe=finetune data.root=FOLDER",
    }.items():
        with pytest.raises(RecipeError) as error:
            read(typed.split())
        assert str(error.value).endswith(f"type {TRAIN} {told}"), typed
        assert read(told.split())[1]


def test_each_of_many_images_is_looked_at_as_often_as_one_of_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [tmp_path / f"{number}.jpg" for number in range(80)]
    for image in images:
        image.touch()
    looks: list[object] = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda *args, **options: (looks.append(args), stat(*args, **options))[1])
    counts = []
    for number in (40, 80):
        looks.clear()
        assert len(read(["predict", "checkpoint=runs/x", *map(str, images[:number])])[1]) == number + 1
        counts.append(len(looks))
    assert counts[1] <= 2 * counts[0]


def test_the_smallest_of_each_family_is_a_model() -> None:
    assert {*SMALLEST} <= {*torchvision_classifiers()}


def test_of_a_folder_of_runs_one_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("old", "new"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "recipe.yaml").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("cat", "dog"):
        Path("ph", folder).mkdir(parents=True)
    for typed, told in {
        "evaluate checkpoint=runs": "evaluate checkpoint=runs/RUN",
        "evaluate runs/": "evaluate checkpoint=runs/RUN",
        "predict runs ph": "predict checkpoint=runs/RUN ph",
        "predict ph/ ~/runs": "predict ph/ 'checkpoint=~/runs/RUN'",
        "predict checkpoint=runs data.root=photos": "predict checkpoint=runs/RUN data.root=photos",
        "recipe=runs": "recipe=runs/RUN",
    }.items():
        with pytest.raises(RecipeError) as error:
            read(typed.split())
        assert re.search(r" in (runs|~/runs)\b", str(error.value))
        assert str(error.value).endswith(f": type {TRAIN} {told}")


def test_a_folder_beside_a_recipe_of_photos_leaves_that_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pets").mkdir()
    Path("mine.yaml").write_text("extends: finetune\nepochs: 3\n")
    with pytest.raises(RecipeError, match=r"type python -m trainer recipe=mine\.yaml data\.root=pets$"):
        read(["recipe=mine.yaml", "pets"])


@pytest.mark.parametrize("typed", sorted({*TOLD.values()}))
def test_what_it_tells_to_type_is_a_recipe_that_works(typed: str) -> None:
    """No other advice follows, from whoever reads the words next; but for files and folders that are not here."""
    check_that_it_works(typed)


@pytest.mark.parametrize("typed", SAID)
def test_what_a_sentence_tells_to_type_works(typed: str) -> None:
    with pytest.raises(RecipeError) as error:
        read(shlex.split(typed))
    told = str(error.value).rpartition(f" type {TRAIN} ")[2]
    if told != str(error.value):
        check_that_it_works(told)


def check_that_it_works(typed: str) -> None:
    if "timm:" in typed:
        pytest.importorskip("timm")
    command, words = read(shlex.split(typed))
    own, rest = split_words([word for word in words if "=" in word], COMMAND_WORDS.get(command, ()))
    source = own.get("recipe", "")
    if command not in COMMAND_WORDS or source == "RUN" or source.startswith("runs/"):
        return
    if command == "compare":
        modes = parse_modes(own["modes"]) if "modes" in own else None
        assert entries(source, rest, modes, parse_sweep(own["sweep"]) if "sweep" in own else None)
        return
    if command == "sweep":
        rest = [f"{key}={part.ends()[0]}" if (part := dimension(key, value)) else word
                for word in rest for key, _, value in [word.partition("=")]]  # fmt: skip
    made = load(source or None, *rest)
    if command in ("train", "plan"):
        check_processes(made, int(own.get("nproc", 2 if made.pipeline.schedule in ("gpipe", "1f1b") else 1)))
        if "plugin" not in own:
            check_names(made)
