"""Values of other programs in our words, and answers for keys that only they have: a row for each key.

To add a value, write it into the row of its key, behind what is to be typed; to add a key, write a row. What is to be
typed is a value or whole words; in brackets stands what there is to say. {value} is what was typed, read as that key's.
Values are written in small letters without other signs than dots; YES, NO and NONE stand for all words that say so, and
* for any other value.
"""

from __future__ import annotations

from trainer.recipe.reflection import choices
from trainer.recipe.traits import TRAITS

YES, NO = ("1", "y", "yes", "on", "t", "true"), ("0", "n", "no", "off", "f", "false")
NONE = (*NO, "none", "null", "nil")

_LOSS = " (which has this loss)"
_IMAGENET = "imagenet imagenet1k imagenet2012 ilsvrc2012 ilsvrc"
SMALLEST = {  # of the families of torchvision's models
    "convnext_tiny": "convnext", "densenet121": "densenet", "efficientnet_b0": "efficientnet",
    "efficientnet_v2_s": "efficientnetv2", "inception_v3": "inception", "maxvit_t": "maxvit", "mnasnet0_5": "mnasnet",
    "mobilenet_v3_small": "mobilenet mobilenetv3", "regnet_y_400mf": "regnet regnety", "regnet_x_400mf": "regnetx",
    "resnet18": "resnet", "resnext50_32x4d": "resnext", "shufflenet_v2_x0_5": "shufflenet shufflenetv2",
    "squeezenet1_1": "squeezenet", "swin_t": "swin", "swin_v2_t": "swinv2", "vgg11": "vgg", "vit_b_16": "vit",
    "wide_resnet50_2": "wideresnet",
}  # fmt: skip
# Keys, of ours or of others (COMMAND:KEY for one command alone): what to type, and for which values.
_VALUES: dict[str, dict[str, str]] = {
    "mode": {
        **{mode: traits.also_called for mode, traits in TRAITS.items()},
        **{f"mode=pipeline pipeline.schedule={name}": name for name in choices()["pipeline.schedule"][:-1]},  # no null
        "fsdp (there is no {value} here; fsdp shares a model among devices too)": "tensorparallel tp horovod zero "
        "zero3 deepspeed",
    },
    "precision": {
        "fp32": "32 float32 float full 32true fp32true single no none false o0", "tf32": "tensorfloat32 high",
        "bf16": "bfloat16 bf16mixed bf16true amp autocast mixed true auto",
        "fp16": "16 float16 half 16mixed 16true fp16mixed o1 o2 o3",
    },
    "amp use_amp half mixed autocast": {"precision=bf16": "YES", "precision=fp32": "NONE", "precision={value}": "*"},
    "allow_tf32": {"precision=tf32": "YES", "precision=fp32": "NONE", "precision={value}": "*"},
    **{
        name: {f"precision={name}": "YES o1 o2 o3", "precision=fp32": "NONE", "precision={value}": "*"}
        for name in ("tf32", "bf16", "fp16")
    },
    "fp32": {"precision=fp32": "*"},
    "devices": {
        "auto": "-1 [-1] auto all gpu gpus cuda tpu none true",
        "[cpu]": "cpu xla",
        "[cpu] (Apple's GPUs are not supported)": "mps",
    },
    "cpu no_cuda use_cpu": {"devices=auto": "NO", "devices=[cpu]": "*"},
    "cuda use_cuda use_gpu": {"devices=auto": "YES none null nil", "devices=[cpu]": "NO", "device={value}": "*"},
    "nproc": {"(without nproc= there is a process for every GPU: leave it out)": "-1 auto all gpu gpus max cpu"},
    "modes": {"(without modes= all of them are compared: leave it out)": "all"},
    "nnodes num_nodes n_nodes num_machines nodes": {"NNODES={value} (on each node; see guide nodes)": "*"},
    "node_rank machine_rank": {"NODE_RANK={value}": "*"},
    "master_addr main_process_ip": {"MASTER_ADDR={value}": "*"},
    "master_port main_process_port": {"MASTER_PORT={value}": "*"},
    "submit:nnodes submit:num_nodes submit:n_nodes submit:num_machines": {"nodes={value}": "*"},
    "submit:mem": {"memory={value}": "*"}, "submit:cpus_per_task submit:c": {"cpus={value}": "*"},
    "submit:time_limit submit:max_time": {"time={value}": "*"},
    "batch_size": {"(plan says beforehand what fits into memory)": "-1 auto"},
    "per_device_train_batch_size per_device_batch_size train_micro_batch_size_per_gpu batch_size_per_gpu": {
        "(batch_size= is over all devices: {value} times their number)": "*"
    },
    "pp pp_size pipeline_parallel_size": {"mode=pipeline pipeline.stages={value}": "*"},
    **{mode: {f"mode={mode}": "YES"} for mode in TRAITS},
    "dp dp_size data_parallel_size": {
        "mode=dp": "YES", "(replicas are processes beyond the stages: nproc= is stages times replicas)": "*",
    },
    "distributed multiprocessing_distributed multi_gpu": {"mode=ddp": "YES"},
    "use_fsdp deepspeed use_deepspeed zero_stage": {"(mode=fsdp alone shards weights: leave it out)": "NONE",
                                                    "mode=fsdp (a file of DeepSpeed's is not read)": "*"},
    "recipe": {
        "recipe=resnet50 data.root=/path/to/imagenet": _IMAGENET,
        "cifar10 (or recipe=cifar100)": "cifar",
        "recipe=finetune data.root=FOLDER": "photos imagefolder folder custom myphotos images finetuning transfer",
        **{f"recipe=digits mode={mode}": mode.replace("_", "") for mode in TRAITS},
    },
    "model.name": {
        **{f"{name} (the smallest of them)": families for name, families in SMALLEST.items()},
    },
    "hub": {"vit_b_16": "vitbasepatch16224", "vit_b_32": "vitbasepatch32224", "vit_l_16": "vitlargepatch16224"},
    "model.weights": {"DEFAULT": "imagenet YES", "null": "scratch NONE"},
    "model.freeze": {"-1": "YES"},
    "data.name": {
        "data.name=imagefolder data.root=/path/to/imagenet": _IMAGENET,
        "shards": "webdataset wds tar tars parquet",
    },
    "data.channels": {"1": "gray grey grayscale greyscale l", "3": "rgb color colour"},
    "augment": {"augment.auto={value}": "*"},
    "augment.auto": {"trivial": "ta trivialaugment ta_wide tawide true", "rand": "ra randaugment randaug",
                     "autoaugment": "aa imagenet autoaug", "none": "false off no"},
    "augment.crop": {"resized": "randomresizedcrop rrc", "pad": "randomcrop padding"},
    "augment.hflip": {"0.5": "YES"}, "augment.mixup": {"0.2": "YES"}, "augment.cutmix": {"1.0": "YES"},
    "augment.erase": {"0.25": "YES"}, "clip_grad_norm": {"1.0": "YES"}, "ema": {"0.999": "YES"},
    "optimizer": {"optimizer.name={value}": "*"},
    "optimizer.name": {"sgd": "momentum sgdmomentum nesterov torch.optim.sgd", "adamw": "torch.optim.adamw adamwtorch",
                       "adam": "torch.optim.adam", "muon": "torch.optim.muon muonadamw"},
    "optimizer.lr_per": {"256": "YES"}, "optimizer.norm_weight_decay": {"0": "NO"},
    "schedule": {"schedule.name={value}": "*"},
    "schedule.name": {
        "cosine": "cos cosineannealing cosineannealinglr cosinelr onecycle true",
        "step": "steplr multistep multisteplr",
        "constant": "none flat fixed const false",
    },
    "schedule.warmup_epochs": {"5": "YES"},
    "task": {"task.name={value}": "*"},
    "task.name": {
        "classification": "classify singlelabel multiclass imageclassification cls",
        "multilabel": "multilabelclassification bce tagging",
        "regression": "mse regress",
    },
    "loss": {
        f"task.name=classification{_LOSS}": "crossentropy ce nll crossentropyloss softmax nllloss "
        "softtargetcrossentropy categoricalcrossentropy sparsecategoricalcrossentropy labelsmoothingcrossentropy "
        "nn.crossentropyloss",
        f"task.name=multilabel{_LOSS}": "bce bcewithlogits binarycrossentropy bceloss bcewithlogitsloss "
        "nn.bcewithlogitsloss",
        f"task.name=regression{_LOSS}": "mse l2 mseloss meansquarederror nn.mseloss",
        "(the loss is the task's: cross-entropy for task.name=classification, BCE for multilabel, MSE for regression; "
        "guide own explains how to use another)": "*",
    },
    "bce_loss": {f"task.name=classification{_LOSS}": "NO", f"task.name=multilabel{_LOSS}": "*"},
    "loss.label_smoothing": {"0.1": "YES"},
    "pipeline": {"mode=pipeline": "YES", "pipeline.schedule={value}": "*"},
    "local_sgd": {"mode=local_sgd": "YES", "local_sgd.every={value}": "*"},
    "stop": {"stop.patience={value}": "*"}, "stop.patience": {"5": "YES"},
    "save": {"save.every_epochs={value}": "*"}, "save.every_epochs": {"1": "YES"},
    "resume": {"auto": "YES -1 latest last must allow", "null": "NONE never"},
    "warmup warmup_ratio warmup_steps warmup_iters lr_warmup_steps num_warmup_steps": {
        "(the warm-up is counted in epochs, and parts of them: schedule.warmup_epochs=0.5)": "*"
    },
    "lrf": {"(schedule.min_lr= is the last learning rate itself, not a share of the first)": "*"},
    "max_time time time_limit steps_per_epoch": {
        "(epochs= or max_steps= ends a run; a stopped run continues with resume=auto)": "*"
    },
    "ckpt checkpoint_path": {"(evaluate and predict have checkpoint=; a run goes on by output=RUN resume=auto)": "*"},
    "fast_dev_run overfit_batches limit_train_batches": {
        "max_steps=1": "YES", "max_steps=null": "NO", "max_steps={value}": "*"
    },
    "logger logging report_to log_with": {"logging.wandb=true": "wandb", "logging.mlflow=true": "mlflow",
                                          "logging.tensorboard=false": "NONE", "logging.tensorboard=true": "*"},
    "verbose": {"logging.progress=false": "NO", "(there is no such switch: leave it out)": "*"},
    "disable_tqdm no_progress_bar": {"logging.progress=true": "NO", "logging.progress=false": "*"},
}  # fmt: skip

# What there is nothing to type for: why, and what others call it.
_LEFT_OUT = {
    "torchrun, srun and mpirun start ranks on several machines, see guide nodes": "local_rank rank rdzv_backend "
    "rdzv_endpoint dist_url hostfile hosts H launcher gres ntasks ntasks_per_node partition",
    "memory is what the machine has; the command plan says what a run needs": "mem mem_per_cpu auto_find_batch_size",
    "predictions are always written, into the folder output=, see guide predict": "predict:save predict:save_txt "
    "predict:save_conf",
    "dropout is the model's own, see guide own": "drop",
    "there is no such switch, see recipes keys logging": "v quiet q debug",
    "GPUs use NCCL and CPUs use gloo automatically, see recipes keys devices": "backend dist_backend ddp_backend",
    "every epoch ends with an evaluation, see guide watch": "val validate do_eval eval val.every eval.every val_every "
    "eval_every val.interval eval.interval val_interval eval_interval eval_freq val_freq check_val_every_n_epoch "
    "val_check_interval eval_strategy evaluation_strategy eval_steps validation_freq",
    "each epoch evaluates each held-out image once, see guide watch": "limit_val_batches validation_steps "
    "num_sanity_val_steps",
    "results do not depend on how many images are evaluated at a time": "per_device_eval_batch_size eval_batch_size "
    "val_batch_size test_batch_size",
    "the run's folder keeps the last weights and the best, by the task's own metric, see guide folder": "monitor "
    "eval_metric metric_for_best_model greater_is_better load_best_model_at_end restore_best_weights save_best_only "
    "save_last save_weights_only checkpoint_metric",
    "the task decides its metrics, see guide tasks": "metrics",
    "resume=auto continues where the run stopped": "start_epoch initial_epoch",
    "choose another output=, or continue: see guide resume": "exist_ok overwrite force overwrite_output_dir",
    "images have one side, data.image_size=": "rect square",
    "pixels are normalised with data.mean= and data.std= automatically": "rescale normalize normalise",
    "top-1 and top-5 are always shown, see guide tasks": "topk top_k",
    "ranks are started by nproc=, see guide modes": "standalone",
}
_SAY_SO = {"YES": YES, "NO": NO, "NONE": NONE}
# By key: what is said here for each value.
OTHER_VALUES: dict[str, dict[str, str]] = {
    name: {"*": f"({why}: leave it out)"} for why, names in _LEFT_OUT.items() for name in names.split()
}
for _names, _row in _VALUES.items():
    _texts = {
        value: text for text, words in _row.items() for word in words.split() for value in _SAY_SO.get(word, [word])
    }
    OTHER_VALUES |= dict.fromkeys(_names.split(), _texts)
