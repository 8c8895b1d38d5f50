"""What other programs call a recipe's keys, so that an error can say what they are called here.

Names of torchvision's references, timm, Lightning, Ultralytics, Keras, Hugging Face, Accelerate and torchrun. What they
call values is in `cli.dialects.other_values`.
"""

from __future__ import annotations

# Each key of ours with what others call it: lower case, dashes as underscores. A new name goes into the row of its key.
_KEYS = {
    "recipe": "config c cfg yaml config_name config_file hparams_file",
    "nproc": "n np nproc_per_node num_gpus n_gpus n_gpu ngpus gpu_count num_processes n_procs num_procs world_size "
    "devices_per_node",
    "plugin": "user_module import_module custom_module",
    "checkpoint": "ckpt checkpoint_path",
    "mode": "strategy parallel parallelism parallel_mode dist_mode distributed_type trainer.strategy",
    "task.name": "bce_loss problem problem_type task_type",
    "model.name": "arch a architecture model_name net network backbone model_type model.arch model.type "
    "model_name_or_path",
    "model.init_from": "initial_checkpoint finetune_from pretrained_path pretrained_weights load_from load "
    "load_weights weights_path model.checkpoint model.path",
    "model.weights": "pretrained",
    "model.num_classes": "n_out num_outputs nc n_classes nb_classes classes num_labels data.num_classes",
    "model.freeze": "freeze_layers freeze_backbone freeze_encoder freeze_at frozen_layers frozen_stages "
    "num_frozen_layers",
    "data.name": "dataset dataset_name data_name data.dataset dataset.name data_set",
    "data.root": "data_dir data_path data_root datadir dataset_dir dataset_path root path source src images "
    "image_folder img_dir folder input_dir input inputs data.path data.dir data.folder data.source dataset.root",
    "data.cache": "cache_dataset cache_images",
    "data.val_fraction": "val_split validation_split val_size test_size val_ratio validation_fraction",
    "data.balance": "balanced weighted_sampler class_balance balance_classes oversample",
    "data.channels": "in_chans in_channels input_channels color_mode num_channels",
    "data.image_size": "imgsz img_size image_size input_size input_shape size resolution crop_size train_crop_size "
    "val_crop_size data.img_size data.size",
    "data.workers": "num_workers workers n_workers nw j dataloader_num_workers dataloader.num_workers "
    "data.num_workers loader.workers cpus_per_task",
    "augment.mixup": "mixup_alpha mix_up",
    "augment.cutmix": "cutmix_alpha",
    "augment.erase": "random_erase random_erasing reprob erasing",
    "augment.auto": "auto_augment autoaugment aa augmentation randaugment",
    "augment.hflip": "fliplr horizontal_flip random_flip flip",
    "batch_size": "batch bs b train_batch_size per_device_train_batch_size per_device_batch_size batch_size_train "
    "total_batch_size global_batch_size mini_batch_size data.batch_size dataloader.batch_size loader.batch_size "
    "trainer.batch_size",
    "accumulate": "gradient_accumulation_steps accumulate_grad_batches grad_accum grad_accum_steps accum_iter "
    "gradient_accumulation accumulation_steps accum trainer.accumulate_grad_batches "
    "batches_per_allreduce backward_passes_per_step",
    "epochs": "epoch max_epochs num_epochs n_epochs nb_epochs num_train_epochs total_epochs ep e trainer.max_epochs "
    "trainer.epochs training.epochs train.epochs",
    "max_steps": "steps num_steps n_steps total_steps max_iter max_iters iterations iters num_iterations "
    "trainer.max_steps",
    "optimizer.name": "opt optim optimizer_name optimizer_type optimizer.type optim.name optimizer._target_",
    "optimizer.lr": "lr lr0 base_lr learning_rate learningrate init_lr initial_lr blr max_lr optim.lr "
    "optimizer.learning_rate model.lr train.lr",
    "optimizer.weight_decay": "wd l2 weightdecay optim.weight_decay",
    "optimizer.momentum": "mom optim.momentum",
    "optimizer.betas": "adam_betas opt_betas",
    "optimizer.eps": "adam_epsilon opt_eps epsilon adam_eps",
    "optimizer.lr_per": "lr_base_size base_batch_size scale_lr auto_scale_lr lr_scaling",
    "optimizer.layer_decay": "llrd layerwise_lr_decay layer_wise_lr_decay lr_layer_decay",
    "schedule.name": "sched scheduler lr_scheduler lr_schedule lr_scheduler_type lr_policy scheduler.name cos_lr",
    "schedule.warmup_epochs": "warmup lr_warmup_epochs num_warmup_epochs scheduler.warmup_epochs warmup_steps "
    "warmup_ratio warmup_iters lr_warmup_steps num_warmup_steps",
    "schedule.warmup_factor": "lr_warmup_decay",
    "schedule.min_lr": "lr_min eta_min min_learning_rate",
    "schedule.step_epochs": "lr_step_size step_size decay_epochs lr_step lr_drop",
    "schedule.gamma": "lr_gamma decay_rate lr_decay",
    "loss.label_smoothing": "smoothing labelsmoothing label_smoothing_factor",
    "loss.class_weights": "class_weight cls_weight",
    "precision": "fp16_opt_level opt_level dtype data_type mixed_precision amp_dtype torch_dtype trainer.precision",
    "compile": "jit_compile torch_compile torchcompile use_compile torch.compile",
    "ema": "use_ema ema_momentum ema_decay model_ema model_ema_decay",
    "clip_grad_norm": "clipnorm global_clipnorm clip_grad clip grad_clip gradient_clip_val max_grad_norm "
    "clip_gradients gradient_clipping max_norm trainer.gradient_clip_val",
    "sync_bn": "sync_batchnorm syncbn sync_batch_norm sync_bn_layers",
    "channels_last": "channelslast memory_format",
    "pipeline.stages": "num_stages n_stages pp pp_size pipeline_parallel_size",
    "pipeline.microbatches": "microbatches num_microbatches n_microbatches micro_batches chunks",
    "pipeline.split_size": "micro_batch_size microbatch_size",
    "pipeline.schedule": "pp_schedule pipeline_schedule",
    "pipeline.recompute": "gradient_checkpointing activation_checkpointing checkpoint_activations grad_checkpointing",
    "fsdp.offload": "cpu_offload offload_params offload_to_cpu fsdp_offload_params fsdp.cpu_offload",
    "local_sgd.every": "sync_every local_steps sync_interval slowmo_freq",
    "local_sgd.outer_lr": "outer_learning_rate slowmo_lr",
    "local_sgd.outer_momentum": "slowmo_factor slowmo_momentum",
    "ddp.compress": "comm_hook ddp_comm_hook fp16_allreduce fp16_compression",
    "devices": "device gpu gpus gpu_id gpu_ids device_ids cuda_visible_devices accelerator trainer.devices "
    "trainer.gpus trainer.accelerator",
    "threads": "num_threads omp_num_threads torch_threads",
    "stop.patience": "early_stopping early_stop earlystopping early_stopping_patience early_stopping_rounds "
    "es_patience",
    "save.every_epochs": "save_period save_epochs checkpoint_interval save_freq every_n_epochs save_every "
    "save_interval checkpoint.every checkpoint.interval checkpoint.epochs checkpoint.every_epochs checkpoint.freq "
    "save.interval save.epochs",
    "save.every_steps": "save_steps checkpoint_steps every_n_train_steps checkpointing_steps checkpoint.steps "
    "recovery_interval checkpoint.every_steps checkpoint.every_n_steps save.steps",
    "save.keep": "save_total_limit save_top_k checkpoint_hist checkpoints_total_limit total_limit checkpoint.keep "
    "checkpoint.save_top_k",
    "logging.every_steps": "print_freq log_interval log_every log_every_n_steps logging_steps log_freq log.interval "
    "log.every log.steps log.every_steps log.freq logging.interval logging.every logging.steps logging.freq "
    "steps_per_print",
    "logging.wandb": "log_wandb use_wandb wandb wandb_project wandb.project",
    "logging.mlflow": "mlflow use_mlflow mlflow_tracking_uri mlflow.tracking_uri",
    "logging.progress": "progress_bar enable_progress_bar progress",
    "resume": "resume_from resume_from_checkpoint continue ckpt_path resume_path",
    "seed": "data_seed random_seed manual_seed rng_seed seed_everything",
    "deterministic": "full_determinism use_deterministic_algorithms reproducible trainer.deterministic",
    "output": "project_dir checkpoint_dir checkpoint.dir log.dir out output_dir outdir output_path save_dir savedir "
    "save_path project log_dir logdir logging_dir default_root_dir run_dir work_dir exp_name run_name experiment_name "
    "results_dir hydra.run.dir dest o",
}
# What no key sets, by the words that names have of it: what there is instead, and where to read on.
SUBJECTS = {
    "dropout is the model's own, see guide own": "dropout drop_rate drop_path drop_connect drop_prob stochastic_depth",
    "augment.auto=trivial rotates, shifts, shears and recolours images, see recipes keys augment": "jitter hsv degrees "
    "rotation rotate translate translation shear shift_range brightness contrast saturation hue",
    "augment.crop=resized enlarges random parts of images, see recipes keys augment": "multi_scale random_scale zoom",
    "the keys of augment vary training images, and all get data.image_size= pixels a side, see recipes keys augment": (
        "transforms"
    ),
    "images get data.image_size= pixels a side, held-out ones by cutting out the middle, see guide export": "resize "
    "interpolation crop_pct center_crop",
    "all images are used (data.samples= is of synthetic ones), max_steps= ends a run sooner, see recipes keys data": (
        "max_samples num_samples limit_samples subset"
    ),
    "data.image_column= and data.label_column= name the columns that are read, see recipes keys data": "column columns",
    "held-out images are in a folder val of data.root=, or data.val_fraction= of all, see guide photos": "val_dir "
    "test_dir",
    "classes are named by the folders in data.root=, or by data.labels=, see guide photos": "class_map class_names "
    "class_file class_list label_map label_names id2label label2id",
    "the last layer has model.num_classes= outputs, see guide own for other models": "include_top",
    "the rate rises from schedule.warmup_factor= of optimizer.lr, for all weights alike, over schedule.warmup_epochs=, "
    "see recipes keys schedule": "warmup",
    "schedule.name=step changes the rate every schedule.step_epochs=, see recipes keys schedule": "milestones",
    "the rate falls once, over all epochs=, see recipes keys schedule": "t_max t_0 t_initial t_mult cycle cycles "
    "warm_restarts cooldown",
    "batch_size= is a step of the optimizer, over all devices, computed in accumulate= pieces, see guide recipes": (
        "nbs nominal_batch"
    ),
    "the ranks' gradients are averaged as mode= has it, see guide modes": "adasum allreduce",
    "a loss or gradient that is not finite ends the run, see guide errors": "anomaly nan",
    "each run ends by saying what limits its speed, see guide speed": "profile profiler profiling",
    "nothing is uploaded, but export writes a model for other programs, see guide export": "push_hub hub_model "
    "hub_token upload",
    "every class gets a probability, without a threshold, see guide predict": "confidence conf_thres "
    "conf_threshold iou nms",
    "recipe= is a file of keys, and predictions have no threshold, see guide predict": "conf",
    "precision=fp16 scales the loss automatically, see guide recipes": "loss_scale scaler",
    "every image is evaluated once, as it is, see guide predict": "tta",
    "training images are shuffled in every epoch, see guide recipes": "shuffle",
    "images cannot be varied in this way, see recipes keys augment": "vflip flipud vertical_flip mosaic copy_paste "
    "perspective",
    "gradients are clipped by their norm, see recipes keys clip_grad_norm": "gradient_clip_algorithm clip_mode",
    "ddp needs no settings, see guide modes": "find_unused_parameters gradient_as_bucket_view static_graph",
    "kernels are chosen by trying them, see guide recipes": "cudnn benchmark",
    "memory is pinned where a GPU trains, see guide speed": "pin_memory",
    "workers live as long as the run, see guide speed": "persistent_workers",
    "TensorBoard shows the curves, see guide watch": "plot plots",
    "callbacks are Python's, see guide python": "callback callbacks",
    "a job that SLURM requeues goes on by itself, see guide resume": "requeue",
}
OTHER_KEYS = {name: key for key, names in _KEYS.items() for name in names.split()}
