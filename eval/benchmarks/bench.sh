# The measurements of speed and memory, one after the other: `make bench`. Each line is one measurement; any of them runs
# by itself. The comment above it has the page that quotes its figures, minutes on an H200, and what else it needs.
# A measurement that fails does not stop the others; the exit status is that of the last one that failed.
python=${PYTHON:-python}
failed=0

measure() {
    echo "$ $*"
    "$python" -m "hf_lowbit_kv.eval.benchmarks.$@" || { failed=$?; echo "FAILED with status $failed: $*"; }
}

long="--shape gqa_b8_32k --shape gqa_b1_128k"
all="$long --shape gqa_b32_8k --shape mha_b8_8k"
both="--backend cuda --backend triton"
vecinfer="--preset vecinfer-2 --preset vecinfer-4 --preset vecinfer-1.5"
eigen="--preset eigen-2 --preset eigen-3"
steps="--contender kivi-2/tuned --contender dense/tuned --contender kivi-2/recorded --contender StaticCache/compiled --contender DynamicCache/eager"

# docs/dev/own-formats.md: 2.5 minutes
measure bench_decode --preset kivi-2 --preset kitty-pro $eigen $all --backend cuda
# docs/dev/recording.md: 1.5 minutes
measure bench_start --how recorded
# docs/dev/calibrated-presets.md: 4 minutes; then a codebook for each KV head, 1.5
measure bench_decode --preset kivi-2 $vecinfer $all --backend cuda
measure bench_decode --preset vecinfer-2 $all --backend cuda --per-head
# docs/dev/calibrated-presets.md, docs/dev/own-formats.md: 3 and 6 minutes, 60 GB
measure bench_calibrate --preset vecinfer-2
measure bench_calibrate --preset eigen-2
# docs/dev/calibrated-presets.md: heads of 64 channels, and Triton, 4 minutes
measure bench_decode --preset kivi-2 --preset kitty-pro $vecinfer $eigen $long --backend cuda --head-dim 64
measure bench_decode --preset vecinfer-2 --preset vecinfer-4 $long --backend triton
# README: 2 minutes
measure bench_decode --preset int8 --preset kivi-4 --preset k4v2 --preset kitty-pro --preset kitty --preset kivi-2 --preset vecinfer-2 $long --backend cuda
# docs/dev/mla.md: 5 minutes, 80 GB, flashinfer-python
measure bench_mla layer
measure bench_mla step
# docs/dev/recording.md: start of a compiled step, 6 minutes
measure bench_start --how compiled
# README, docs/benchmarks.md: 20 minutes, 130 GB
measure bench_generate caches --tokens 1024 --tokens 131072 $steps --contender quanto-4/eager@1024
measure bench_generate caches --batch 8 --tokens 32768 $steps
# docs/dev/recording.md: recorded steps, with compression and without, 3 minutes, 70 GB
measure bench_generate caches --batch 8 --tokens 32768 --contender kivi-4-sink/recorded --contender dense/recorded --contender kivi-2/recorded --contender kivi-4-sink/unfused --contender dense/unfused
# docs/quantized-weights.md: 3 minutes, 60 GB, torchao and bitsandbytes
measure bench_generate weights
# docs/benchmarks.md: 3 minutes, 80 GB
measure bench_memory generate
# docs/benchmarks.md, then docs/dev/calibrated-presets.md and docs/dev/own-formats.md: 4 minutes, 40 GB
measure bench_prompt model --layers 8 --tokens 32768 --chunk 8192 --chunk 2048 --preset kivi-4 --preset kivi-2
measure bench_prompt model --layers 8 --tokens 32768 --chunk 8192 --preset vecinfer-2 --preset vecinfer-1.5 --preset eigen-2
# docs/dev/prefill.md: 5 minutes, 40 GB
measure bench_prompt attention
# docs/benchmarks.md: 12, 8 and 3 minutes, 40 GB
measure bench_decode --preset dense --preset int8 --preset int6 --preset int5 --preset fp8 --preset kv8 --preset kivi-4 --preset bitdecoding-kc-4 --preset bitdecoding-kt-4 --preset kv4 --preset k4v2 --preset kivi-2 --preset bitdecoding-kc-2 --preset kitty --preset kitty-pro $all $both
measure bench_decode --matrix --rounds 10
measure bench_decode --preset kivi-2-hadamard --preset kitty-hadamard $all $both
# docs/benchmarks.md, docs/dev/calibrated-presets.md: 22 minutes, 80 GB
measure bench_memory batch
measure bench_memory batch --contender DynamicCache/eager --contender dense/compiled --contender kivi-2-sink/compiled --contender eigen-2/compiled --contender eigen-3/compiled
# docs/benchmarks.md: 7 minutes, 60 GB
measure bench_generate caches --tokens 1048576 --contender kivi-2/tuned
exit $failed
