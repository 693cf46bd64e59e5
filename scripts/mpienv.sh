# What mpirun needs on a laptop, a workstation or in CI. Source it, then start:
#
#   source scripts/mpienv.sh
#   mpirun -n 4 hpc-ctr train job.yaml
#
# A setting that is already in the environment is left as it is.

HPC_CTR_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)
export HPC_CTR_ROOT

# Where the Python environment is: the active conda environment when it brings its own MPI (environment.yml), else .venv.
if [ -n "${CONDA_PREFIX:-}" ] && [ "${CONDA_DEFAULT_ENV:-base}" != base ] \
        && [ -x "$CONDA_PREFIX/bin/mpicxx" ] && [ -x "$CONDA_PREFIX/bin/python" ]; then
    HPC_CTR_ENV=$CONDA_PREFIX
else
    HPC_CTR_ENV=$HPC_CTR_ROOT/.venv
fi
export HPC_CTR_ENV
case ":$PATH:" in
    *":$HPC_CTR_ENV/bin:"*) ;;
    *) export PATH="$HPC_CTR_ENV/bin:$PATH" ;;
esac

# Open MPI refuses to run as root unless told twice.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# More ranks than cores are allowed: the name of the setting is another one in Open MPI 5 and 4.
export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}"
export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
# One rank a core beats threads inside a rank, and OpenMP threads that spin take the core of those that read data.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
