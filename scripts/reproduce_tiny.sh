#!/usr/bin/env bash
# Retrains the tiny checkpoint from nothing, on CPU cores alone, and evaluates it: draws the world,
# trains the backbones and every stage, assembles the checkpoint, plays the held-out games.
#   bash scripts/reproduce_tiny.sh                       with the settings of configs/tiny
#   bash scripts/reproduce_tiny.sh --minutes 90          a short version: fewer steps, fewer games
#   bash scripts/reproduce_tiny.sh --minutes 90 --plan   only says what that would be
# Environment: RUNS takes all that is trained (runs/reproduce, or runs/reproduce_90 for the short
# version), DATA the drawn games (data/tiny), CORES how many to use (2, or 1 where there is one).
# The shipped checkpoint stays as it is. Ctrl-C saves; the same command goes on from there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { echo "usage: bash scripts/reproduce_tiny.sh [--minutes N] [--plan]" >&2; exit 2; }
minutes=0 plan_only=
while [ "$#" -gt 0 ]; do
  case "$1" in
    --minutes) minutes=${2:-}; shift; [[ "$minutes" =~ ^[1-9][0-9]*$ ]] || usage ;;
    --plan) plan_only=1 ;;
    *) usage ;;
  esac
  shift
done

bash scripts/setup_env.sh
python=.venv/bin/python
CORES=${CORES:-$("$python" -c 'import os; print(min(os.cpu_count() or 1, 2))')}
DATA=${DATA:-data/tiny}
RUNS=${RUNS:-runs/reproduce$([ "$minutes" -eq 0 ] || echo "_$minutes")}

# The plan: for each step its overrides, none in the full version. Its costs are seconds of one
# server core with AVX-512 and bfloat16, one thread, measured with the settings in configs/tiny.
bf16=$("$python" -c 'import torch; print(int(torch.ops.mkldnn._is_mkldnn_bf16_supported()))')
plan=$("$python" - "$minutes" "$CORES" "$bf16" <<'PYTHON'
import sys

from animegamer.config import load

minutes, cores, bf16 = (int(argument) for argument in sys.argv[1:])
GAMES, VALIDATION_GAMES, SHOTS_A_GAME = 6000, 80, 5.5
# A step of whole shots; of first frames; seconds.
STEP = {"video_base": (0.57, 0.52), "stage1_warmup": (0.5, 0.5), "stage1_joint": (0.61, 0.56),
        "stage1_decoder": (0.61, 0.56), "stage2": (0.62, 0.62), "stage3": (0.61, 0.56)}
BACKBONE = {"text_encoder.train": 0.07, "language_base.train": 0.13, "image_encoder.train": 0.26,
            "autoencoder.train": 0.2, "autoencoder.decoder_train": 0.18}
DRAW, FEATURES, PREDICT, PLAY = 0.22, 0.02, 0.02, 0.5  # a game; a shot; a shot; a judged shot
PROBES, START = 1000, 15  # held-out games and probes; loading, for each of some 14 steps
WITHOUT_BF16 = 1.5  # float32 took 1.3 times as long on that core
TWO_THREADS = 1.6  # assumed: how much faster two threads are than one, with room in the estimate

configs = {name: load(f"configs/tiny/{name}.yaml") for name in [*STEP, "backbones", "evaluate"]}
slower = 1 if bf16 else WITHOUT_BF16


def backbone(name):
    part, schedule = name.split(".")
    return getattr(getattr(configs["backbones"].pretrain, part), schedule).steps


def seconds(share):
    """Of the whole, side by side where the script does so."""
    def stage(name):
        train = configs[name].train
        whole, first = STEP[name]
        return slower * share * train.steps * (
            train.first_frame_share * first + (1 - train.first_frame_share) * whole)

    def backbones(*names):
        return slower * share * sum(backbone(name) * BACKBONE[name] for name in names)

    def beside(one, other):
        return max(one, other) if cores > 1 else one + other

    games = share * (GAMES + VALIDATION_GAMES)
    evaluate = configs["evaluate"].evaluate
    judged = 10 * (evaluate.count + evaluate.window_games + evaluate.skill_games
                   + 3 * evaluate.language_games + 2 * evaluate.long_games)
    in_turn = (stage("video_base") + stage("stage1_warmup") + stage("stage1_joint")
               + stage("stage3") + slower * share * judged * PLAY
               + games * SHOTS_A_GAME * (FEATURES + PREDICT))
    return (
        games * DRAW / cores + in_turn / (1 if cores == 1 else TWO_THREADS) + 14 * START
        + beside(backbones("autoencoder.train"), backbones(*list(BACKBONE)[:3]))
        + beside(stage("stage1_decoder"),
                 stage("stage2") + backbones("autoencoder.decoder_train") + PROBES)
    )


share = 1.0
while minutes and seconds(share) * 1.1 > 60 * minutes and share > 0:
    share -= 0.01
if share < 0.05:
    sys.exit(f"--minutes {minutes} is too short for a model that shows anything; take 45 or more")


def scaled(number, least=1):
    return max(least, round(number * share))


lines = {"games": f"{scaled(GAMES)} {scaled(VALIDATION_GAMES)}"}
if share < 1:
    lines["backbones"] = " ".join(
        f"pretrain.{name}.steps={scaled(backbone(name))}" for name in BACKBONE)
    for name in STEP:
        train = configs[name].train
        lines[name] = f"train.steps={scaled(train.steps)}"
        lines[name] += f" train.warmup_steps={scaled(train.warmup_steps)}"
        if train.ema_decay:  # the average spans the same share of the run
            lines[name] += f" train.ema_decay={1 - (1 - train.ema_decay) / share:.4f}"
    counts = ("count", "window_games", "skill_games", "language_games", "long_games")
    lines["evaluate"] = " ".join(
        f"evaluate.{key}={scaled(getattr(configs['evaluate'].evaluate, key))}" for key in counts)
lines["all"] = "" if bf16 else "train.precision=no"
lines["estimate"] = f"{seconds(share) / 60:.0f} minutes on {cores} such cores"
print("\n".join(f"{name}: {line}".rstrip() for name, line in lines.items()))
PYTHON
)
of() { printf '%s\n' "$plan" | sed -n "s/^$1: //p"; }
if [ -n "$plan_only" ]; then
  printf '%s\n' "$plan"
  exit 0
fi

mkdir -p "$RUNS/logs" "$RUNS/done"
settings="$minutes minutes"
if [ "$(cat "$RUNS/settings" 2>/dev/null || echo "$settings")" != "$settings" ]; then
  echo "$RUNS was begun with $(cat "$RUNS/settings"), now $settings: set RUNS to another folder" >&2
  exit 2
fi
if [ ! -e "$RUNS/settings" ]; then
  printf '%s\n' "$plan" > "$RUNS/plan"
  echo "$settings" > "$RUNS/settings"
fi
plan=$(cat "$RUNS/plan") # the plan it was begun with
printf '%s\n' "$plan"

checkpoint=$RUNS/checkpoint
everywhere=(
  data.train="$DATA/train" data.validation="$DATA/validation" data.features="$RUNS/features"
  data.predictions="$RUNS/predictions" data.mllm="$RUNS/stage2" data.workers="$CORES"
)
for part in autoencoder image_encoder text_encoder video_base language_base; do
  everywhere+=("backbones.$part=$checkpoint/backbones/$part")
done
for override in $(of all); do everywhere+=("$override"); done
half=$((CORES > 1 ? CORES / 2 : 1))

# step NAME THREADS COMMAND...: runs what has not been done yet; its output goes to a log.
step() {
  local name=$1 threads=$2 begun=$SECONDS
  shift 2
  if [ -e "$RUNS/done/$name" ]; then return; fi
  echo "$(date +%H:%M) $name ..."
  if ! OMP_NUM_THREADS=$threads OMP_WAIT_POLICY=passive "$@" >> "$RUNS/logs/$name.log" 2>&1; then
    if [ -n "${stopped:-}" ]; then exit 130; fi
    { echo "$name failed; $RUNS/logs/$name.log ends with:"; tail -n 3 "$RUNS/logs/$name.log"; } >&2
    exit 1
  fi
  if [ -n "${stopped:-}" ]; then exit 130; fi # a training that was stopped ends well, too
  echo "$(date +%H:%M) $name took $(((SECONDS - begun + 59) / 60)) min"
  touch "$RUNS/done/$name"
}
script() { # script STEP THREADS FILE CONFIG OVERRIDE...
  local name=$1 threads=$2 file=$3 config=$4
  shift 4
  step "$name" "$threads" "$python" "scripts/$file.py" --config "configs/tiny/$config.yaml" \
    "${everywhere[@]}" "$@"
}
train() { # train STAGE THREADS FILE OVERRIDE...
  local name=$1 threads=$2 file=$3
  shift 3
  # shellcheck disable=SC2046 # several overrides
  script "$name" "$threads" "$file" "$name" "train.run=$RUNS/$name" $(of "$name") "$@"
}
backbones() { # backbones STEP PARTS
  # shellcheck disable=SC2046
  script "$1" "$half" train_backbones backbones "train.run=$RUNS/backbones" "pretrain.parts=$2" \
    $(of backbones)
}
draw() { # draw SPLIT GAMES
  step "draw_$1" 1 "$python" -m data_pipeline.builtin_world --out "$DATA/$1" --split "$1" \
    --games "$2" --workers "$CORES"
}

draw_games() {
  local games
  games=$(of games)
  draw train "${games% *}"
  draw validation "${games#* }"
}
train_autoencoder() { backbones autoencoder '[autoencoder]'; }
train_text_and_clip() { backbones text_and_image_encoder '[text,image_encoder]'; }
up_to_the_encoder() {
  step features "$CORES" "$python" -m data_pipeline.features --config configs/tiny/features.yaml \
    "${everywhere[@]}"
  train video_base "$CORES" train_video_base
  train stage1_warmup "$CORES" train_stage1
  train stage1_joint "$CORES" train_stage1 "train.init=$RUNS/stage1_warmup"
}
train_decoder() { train stage1_decoder "$half" train_stage1 "train.init=$RUNS/stage1_joint"; }
train_mllm_and_judges() {
  train stage2 "$half" train_stage2 "train.init=$RUNS/stage1_joint"
  backbones autoencoder_decoder '[autoencoder_decoder]'
  evaluation prepare_evaluation "$half" prepare_evaluation
}
evaluation() { # evaluation STEP THREADS FILE
  # shellcheck disable=SC2046
  script "$1" "$2" "$3" evaluate "play.checkpoint=$checkpoint" "evaluate.games=$DATA/test" \
    "evaluate.probes=$DATA/probes" "evaluate.output=$RUNS/evaluation" $(of evaluate)
}
to_the_end() {
  script predict_states "$CORES" predict_states stage3 "train.init=$RUNS/stage1_decoder"
  train stage3 "$CORES" train_stage3 "train.init=$RUNS/stage1_decoder"
  script assemble 1 assemble_checkpoint assemble "assemble.encoder=$RUNS/stage1_joint" \
    "assemble.decoder=$RUNS/stage3" "assemble.mllm=$RUNS/stage2" "assemble.output=$checkpoint" \
    "assemble.curves=[$RUNS/video_base,$RUNS/stage1_joint,$RUNS/stage1_decoder,$RUNS/stage2,$RUNS/stage3]"
  evaluation evaluate "$CORES" evaluate
}

# Every lane is a process group of its own, so that Ctrl-C reaches it once, by way of stop().
set -m
lanes=()
stop() {
  trap '' INT TERM
  for lane in ${lanes[@]+"${lanes[@]}"}; do kill -TERM -- "-$lane" 2>/dev/null || true; done
  wait
  echo "stopped; the same command goes on from here" >&2
  exit 130
}
trap stop INT TERM
run() { # run LANE...: side by side with two cores or more, else one after the other
  local lane failed=
  lanes=()
  for lane in "$@"; do
    (trap 'stopped=1' TERM; "$lane") &
    lanes+=("$!")
    if [ "$CORES" -eq 1 ]; then wait "$!" || exit 1; fi
  done
  if [ "$CORES" -gt 1 ]; then for lane in "${lanes[@]}"; do wait "$lane" || failed=1; done; fi
  if [ -n "$failed" ]; then exit 1; fi
}
run draw_games
run train_autoencoder train_text_and_clip
run up_to_the_encoder
run train_decoder train_mllm_and_judges
run to_the_end
echo
cat "$RUNS/evaluation/report.txt"
echo
echo "checkpoint: $checkpoint; report: $RUNS/evaluation. To play with it:"
echo "  $python inference_MLLM.py play.checkpoint=$checkpoint play.output=results/mine"
echo "  $python inference_Decoder.py play.checkpoint=$checkpoint play.output=results/mine"
