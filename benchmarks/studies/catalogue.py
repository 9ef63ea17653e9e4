"""All studies, by their letters."""

from benchmarks.studies import batching, block_size, chunking, memory, prefixes, tenants
from benchmarks.studies.study import Study

STUDIES: dict[str, Study] = {
    study.letter: study
    for study in (
        batching.STUDY,
        batching.LARGE_STUDY,
        memory.STUDY,
        chunking.STUDY,
        block_size.STUDY,
        tenants.STUDY,
        prefixes.STUDY,
    )
}
