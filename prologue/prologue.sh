#!/bin/sh
# Gives this execution its DISPATCH_EPOCH and DISPATCH_ATTEMPT, then becomes the command: the same process, nothing else changed.
# Run as: /bin/sh -c TEXT dispatch-prologue COMMAND ARGUMENT...    The reason for every line is in the README beside this file.
dispatch_refuse() { trap '' PIPE; echo "dispatch: $1" >&2 || :; exit 125; }
dispatch_refuse_bound() { dispatch_refuse "restart count reached the epoch bound: $1; it must stay below 1000000, so start a new submission"; }

dispatch_epoch_is_valid() { # EPOCH
  case $1 in
  0* | *[!0123456789]* | *000000?????? | ?????????????????????*) return 1 ;;
  18000000*) ;;
  1[89]?????????????????? | [23456789]???????????????????) return 1 ;;
  ???????*) ;;
  *) return 1 ;;
  esac
}

dispatch_identify() { # EPOCH ATTEMPT
  dispatch_epoch_is_valid "$1" ||
    dispatch_refuse "epoch or epoch prefix missing or not a number within its bounds: the epoch is $1; it is a generation from 0 to 18000000, a submission from 1 to 999999 and a restart count from 0 to 999999, joined, the last two of six digits: 1000000 is submission 1, restart 0"
  case ${#2}/$2 in
  */ | */[._-]* | */*[!0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz._-]* | [23456789]??/* | ????*/*)
    dispatch_refuse "attempt or token prefix missing or not a folder name: the attempt is $2; use letters, digits, dot, dash and underscore, a letter or digit first, 199 at most" ;;
  esac
  case ${DISPATCH_EPOCH-$1}/${DISPATCH_ATTEMPT-$2} in
  "$1/$2") ;;
  *) dispatch_refuse "the cluster contradicts the pair: DISPATCH_EPOCH is $DISPATCH_EPOCH and DISPATCH_ATTEMPT is $DISPATCH_ATTEMPT, but the counters give $1 and $2; unset the pair if this is a new execution" ;;
  esac
  DISPATCH_EPOCH=$1
  DISPATCH_ATTEMPT=$2
}

case ${DISPATCH_K8S_WORKDIR-} in
'') ;;
/*) command cd -P "$DISPATCH_K8S_WORKDIR" || dispatch_refuse "cannot enter $DISPATCH_K8S_WORKDIR" ;;
*) CDPATH='' command cd -P "./$DISPATCH_K8S_WORKDIR" || dispatch_refuse "cannot enter $DISPATCH_K8S_WORKDIR" ;;
esac

case ${DISPATCH_K8S_ADMISSION+k}${DISPATCH_K8S_RESTART+k}${DISPATCH_K8S_EPOCH_PREFIX+k}${DISPATCH_K8S_TOKEN_PREFIX+k}/${SLURM_JOB_ID+j}${DISPATCH_SUBMISSION+n}/${DISPATCH_EPOCH+e}${DISPATCH_ATTEMPT+a} in
*/e | */a)
  dispatch_refuse "half a pair: DISPATCH_EPOCH is ${DISPATCH_EPOCH-(unset)}, DISPATCH_ATTEMPT is ${DISPATCH_ATTEMPT-(unset)}; set both or neither" ;;
k*) # Kubeflow
  case ${DISPATCH_K8S_ADMISSION-}/${DISPATCH_K8S_RESTART-} in
  */*/* | /* | */ | *[!0123456789/]* | 0[!/]* | */0?*)
    dispatch_refuse "admission or restart count missing or not a number: DISPATCH_K8S_ADMISSION is ${DISPATCH_K8S_ADMISSION-(unset)}, DISPATCH_K8S_RESTART is ${DISPATCH_K8S_RESTART-(unset)}; look at the annotation and the label of the pod that they come from" ;;
  ???????*/* | */???????*)
    dispatch_refuse_bound "$DISPATCH_K8S_ADMISSION + $DISPATCH_K8S_RESTART" ;;
  esac
  DISPATCH_K8S_TOKEN_PREFIX=${DISPATCH_K8S_TOKEN_PREFIX-}.$DISPATCH_K8S_ADMISSION.$DISPATCH_K8S_RESTART
  DISPATCH_K8S_RESTART=$((1000000 + DISPATCH_K8S_ADMISSION + DISPATCH_K8S_RESTART))
  case $DISPATCH_K8S_RESTART in
  1??????) ;;
  *) dispatch_refuse_bound "$((DISPATCH_K8S_RESTART - 1000000))" ;;
  esac
  dispatch_identify "${DISPATCH_K8S_EPOCH_PREFIX-}${DISPATCH_K8S_RESTART#1}" "$DISPATCH_K8S_TOKEN_PREFIX" ;;
/jn/*) # Slurm
  case $SLURM_JOB_ID in
  '' | 0* | *[!0123456789]* | ???????????*)
    dispatch_refuse "job id of Slurm missing or not a number: SLURM_JOB_ID is $SLURM_JOB_ID; unset it outside Slurm" ;;
  esac
  case $DISPATCH_SUBMISSION in
  '' | 0* | *[!0123456789]* | ???????*)
    dispatch_refuse "submission missing or not a number from 1 to 999999: DISPATCH_SUBMISSION is $DISPATCH_SUBMISSION" ;;
  esac
  case ${AGENT_GENERATION-0} in
  '' | 0?* | *[!0123456789]* | ?????????*)
    dispatch_refuse "generation missing or not a number from 0 to 18000000: AGENT_GENERATION is $AGENT_GENERATION; unset it for a job that supersedes none" ;;
  esac
  case ${SLURM_RESTART_COUNT-0} in
  '' | 0?* | *[!0123456789]*)
    dispatch_refuse "restart count missing or not a number: SLURM_RESTART_COUNT is $SLURM_RESTART_COUNT; Slurm leaves it unset on the first run" ;;
  ???????*) dispatch_refuse_bound "$SLURM_RESTART_COUNT" ;;
  esac
  DISPATCH_K8S_EPOCH_PREFIX=$((1000000 + DISPATCH_SUBMISSION))
  case ${AGENT_GENERATION-0} in
  0) DISPATCH_K8S_EPOCH_PREFIX=$DISPATCH_SUBMISSION ;;
  *) DISPATCH_K8S_EPOCH_PREFIX=$AGENT_GENERATION${DISPATCH_K8S_EPOCH_PREFIX#1} ;;
  esac
  DISPATCH_K8S_RESTART=$((1000000 + ${SLURM_RESTART_COUNT-0}))
  dispatch_identify "$DISPATCH_K8S_EPOCH_PREFIX${DISPATCH_K8S_RESTART#1}" \
    "$DISPATCH_SUBMISSION.$SLURM_JOB_ID.${SLURM_RESTART_COUNT-0}" ;;
*/ea) # ready-made
  dispatch_identify "$DISPATCH_EPOCH" "$DISPATCH_ATTEMPT" ;;
/j/)
  dispatch_refuse "submission missing: SLURM_JOB_ID is $SLURM_JOB_ID but DISPATCH_SUBMISSION is unset; set it to the number of this submission, 1 for the first" ;;
*)
  dispatch_refuse "no identity: neither the counters of a cluster nor a finished pair is set; set DISPATCH_EPOCH and DISPATCH_ATTEMPT, or under Slurm DISPATCH_SUBMISSION" ;;
esac

case ${1-} in
'' | -*) dispatch_refuse "no command, or one that starts with -: give a program and its arguments" ;;
esac
export DISPATCH_EPOCH DISPATCH_ATTEMPT
unset DISPATCH_K8S_ADMISSION DISPATCH_K8S_RESTART DISPATCH_K8S_EPOCH_PREFIX DISPATCH_K8S_TOKEN_PREFIX DISPATCH_K8S_WORKDIR
exec "$@"
