// A mixture of experts: each token's rows go to the experts that its router chose, and what they give is summed up.
#pragma once

#include "program.h"

namespace cairn {

// Neighbouring rows of one expert.
struct ExpertRows {
    Index expert, first, rows;
};

// One mixture's matrices, and a step's rows sorted by expert. Everything is as large as the largest step wants it.
struct Buckets {
    std::vector<MatrixView> gate_up, down;
    bool gated;  // whether an expert's first matrix has gates beside what they let through
    Activation activation;
    Index each;  // experts of a token
    Index most;  // rows that are held at once: a run is of experts whose rows are no more
    Inputs wide, back;
    const float* x;
    const std::int32_t* chosen;
    const float* shares;
    float* out;
    std::vector<Index> starts;         // [experts + 1] of the sorted rows
    std::vector<std::int32_t> tokens;  // [M * each], of each sorted row
    std::vector<Index> places;         // [M * each], of each choice among the sorted rows
    std::vector<ExpertRows> parts, tiles;

    void sort(Index count);
    // The experts from `first` on whose rows are no more than `most`: returns the end.
    Index fit(Index first, Index tile_rows);
};

}  // namespace cairn
