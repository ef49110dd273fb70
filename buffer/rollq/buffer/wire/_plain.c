/* The compiled passes over plain groups; see rollq.buffer.wire.compiled. `scan` checks the samples that `put` is given,
 * and reads the data for the group's frame and numbers. `segments` makes the samples' segments from a frame.
 *
 * In a plain group, every sample has completed, without a loss mask, named arrays or an error. For any other group,
 * `scan` and `segments` return None, and the Python code handles the group or reports the problem. So this module never
 * refuses a group and has no messages. Its results equal the Python code's results, byte for byte.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MOST_VERSIONS INT32_MAX

#ifndef SOURCE
#define SOURCE 0 /* the checksum of this file, see hatch_build.py */
#endif

/* The types, values and limits of the passes; `use` sets them once. */
static PyTypeObject *sample_type, *segment_type, *span_type, *array_type;
static PyObject *completed;      /* the status of a sample */
static PyObject *finish_reasons; /* each finish reason, and None, followed by its JSON */
static PyObject *details;        /* (name, (type, JSON of its empty value, ...)) of each detail */
static float logprob_tolerance;
static Py_ssize_t short_entries;

#define NAMES(X)                                                                                                       \
    X(segments) X(status) X(finish_reason) X(reward) X(reward_parts) X(error) X(sampling) X(extra) X(failure)          \
    X(prompt_ids) X(response_ids) X(logprobs) X(versions) X(loss_mask) X(arrays) X(temperature)
#define DECLARE(name) static PyObject *name_##name;
NAMES(DECLARE)

/* ---- text ---- */

typedef struct {
    char *at;
    size_t size, room;
} Text;

static int text_add(Text *text, const char *bytes, size_t size) {
    if (text->size + size > text->room) {
        size_t room = (text->room + size) * 2 + 256;
        char *grown = PyMem_Realloc(text->at, room);
        if (!grown) {
            PyErr_NoMemory();
            return -1;
        }
        text->at = grown;
        text->room = room;
    }
    memcpy(text->at + text->size, bytes, size);
    text->size += size;
    return 0;
}

static int text_literal(Text *text, const char *literal) { return text_add(text, literal, strlen(literal)); }

static int text_number(Text *text, long long number) {
    char digits[24];
    int size = snprintf(digits, sizeof digits, "%lld", number);
    return text_add(text, digits, (size_t)size);
}

/* ---- the content of a group ---- */

typedef struct {
    Py_buffer prompt, response, logprobs;
    PyObject *prompt_array, *response_array, *logprobs_array; /* owned */
    Py_ssize_t prompt_index;
    int held; /* the number of buffers to release */
} Segment;

typedef struct {
    Py_ssize_t epoch, version;
    Py_ssize_t *tokens; /* by sample */
} Weights;

typedef struct {
    Py_ssize_t count; /* of samples */
    Segment *segments;
    Py_ssize_t segment_count, segment_room;
    Py_ssize_t *prompts; /* the first segment with each prompt */
    Py_ssize_t prompt_count, prompt_tokens, tokens;
    Weights *weights;
    Py_ssize_t weights_count;
    PyObject *prompt_at, *weights_at; /* dicts: the index by a hash of the prompt, and by epoch and version */
    Text rows, lengths, reasons;
    PyObject *rewards, *temperatures, *tokens_by_sample;
    int has_numbers;
} Group;

static void release(Group *group) {
    for (Py_ssize_t i = 0; i < group->segment_count; i++) {
        Segment *segment = &group->segments[i];
        Py_buffer *buffers[] = {&segment->prompt, &segment->response, &segment->logprobs};
        for (int held = 0; held < segment->held; held++)
            PyBuffer_Release(buffers[held]);
        Py_XDECREF(segment->prompt_array);
        Py_XDECREF(segment->response_array);
        Py_XDECREF(segment->logprobs_array);
    }
    for (Py_ssize_t i = 0; i < group->weights_count; i++)
        PyMem_Free(group->weights[i].tokens);
    PyMem_Free(group->segments);
    PyMem_Free(group->prompts);
    PyMem_Free(group->weights);
    PyMem_Free(group->rows.at);
    PyMem_Free(group->lengths.at);
    PyMem_Free(group->reasons.at);
    Py_XDECREF(group->rewards);
    Py_XDECREF(group->temperatures);
    Py_XDECREF(group->tokens_by_sample);
    Py_XDECREF(group->prompt_at);
    Py_XDECREF(group->weights_at);
}

/* Every reader returns 1 for a plain value, 0 for any other value, and -1 with an exception set. */

static int read_vector(PyObject *array, char format, Py_buffer *buffer) {
    if (Py_TYPE(array) != array_type) return 0;
    if (PyObject_GetBuffer(array, buffer, PyBUF_ND | PyBUF_FORMAT) < 0) {
        PyErr_Clear(); /* not contiguous, or of a dtype without a format */
        return 0;
    }
    if (buffer->ndim == 1 && buffer->itemsize == 4 && buffer->format[0] == format && !buffer->format[1]) return 1;
    PyBuffer_Release(buffer);
    return 0;
}

static int are_ids(const Py_buffer *buffer) {
    const uint32_t *ids = buffer->buf;
    uint32_t all = 0;
    for (Py_ssize_t i = 0; i < buffer->len / 4; i++)
        all |= ids[i];
    return !(all >> 31);
}

static int are_logprobs(const Py_buffer *buffer) {
    const float *logprobs = buffer->buf;
    int bad = 0;
    for (Py_ssize_t i = 0; i < buffer->len / 4; i++)
        bad |= !(logprobs[i] > -INFINITY && logprobs[i] <= logprob_tolerance); /* NaN fails both */
    return !bad;
}

/* Whether a value is a Python float that is finite as a float32. */
static int is_number(PyObject *value) {
    return PyFloat_CheckExact(value) && fabs(PyFloat_AS_DOUBLE(value)) <= FLT_MAX;
}

static int whole_number(PyObject *value, Py_ssize_t least, Py_ssize_t most, Py_ssize_t *number) {
    if (!PyLong_CheckExact(value)) return 0;
    *number = PyLong_AsSsize_t(value);
    if (*number == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return least <= *number && *number <= most;
}

/* The index of a key; a new key gets the index `next`. -1 with an exception set. */
static Py_ssize_t index_of(PyObject *indices, uint64_t key, Py_ssize_t next) {
    PyObject *number = PyLong_FromUnsignedLongLong(key), *index = NULL;
    if (!number) return -1;
    if ((index = PyDict_GetItemWithError(indices, number))) {
        next = PyLong_AsSsize_t(index); /* borrowed */
    } else if (PyErr_Occurred() || !(index = PyLong_FromSsize_t(next))) {
        next = -1;
    } else {
        if (PyDict_SetItem(indices, number, index) < 0) next = -1;
        Py_DECREF(index);
    }
    Py_DECREF(number);
    return next;
}

static int count_tokens(Group *group, Py_ssize_t sample, Py_ssize_t epoch, Py_ssize_t version, Py_ssize_t tokens) {
    Py_ssize_t at = index_of(group->weights_at, (uint64_t)epoch << 32 | (uint64_t)version, group->weights_count);
    if (at < 0) return -1;
    if (at == group->weights_count) {
        Weights *grown = PyMem_Realloc(group->weights, (at + 1) * sizeof(Weights));
        if (grown) group->weights = grown;
        Py_ssize_t *counts = grown ? PyMem_Calloc(group->count, sizeof(Py_ssize_t)) : NULL;
        if (!counts) {
            PyErr_NoMemory();
            return -1;
        }
        grown[at] = (Weights){epoch, version, counts};
        group->weights_count++;
    }
    group->weights[at].tokens[sample] += tokens;
    return 0;
}

static int read_versions(Group *group, Py_ssize_t sample, PyObject *spans, Py_ssize_t tokens) {
    if (!PyTuple_CheckExact(spans)) return 0;
    Py_ssize_t covered = 0;
    Text *rows = &group->rows;
    if (text_literal(rows, "[") < 0) return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(spans); i++) {
        PyObject *span = PyTuple_GET_ITEM(spans, i);
        Py_ssize_t epoch, version, count;
        if (Py_TYPE(span) != span_type || PyTuple_GET_SIZE(span) != 3) return 0;
        if (!whole_number(PyTuple_GET_ITEM(span, 0), 0, MOST_VERSIONS, &epoch)) return 0;
        if (!whole_number(PyTuple_GET_ITEM(span, 1), 0, MOST_VERSIONS, &version)) return 0;
        if (!whole_number(PyTuple_GET_ITEM(span, 2), 1, tokens - covered, &count)) return 0;
        covered += count;
        if (count_tokens(group, sample, epoch, version, count) < 0) return -1;
        if (text_literal(rows, i ? ",[" : "[") < 0 || text_number(rows, epoch) < 0 || text_literal(rows, ",") < 0 ||
            text_number(rows, version) < 0 || text_literal(rows, ",") < 0 || text_number(rows, count) < 0 ||
            text_literal(rows, "]") < 0)
            return -1;
    }
    if (text_literal(rows, "]") < 0) return -1;
    return covered == tokens;
}

static uint64_t hash(const Py_buffer *buffer) {
    const uint32_t *ids = buffer->buf;
    uint64_t mixed = (uint64_t)buffer->len;
    for (Py_ssize_t i = 0; i < buffer->len / 4; i++)
        mixed = (mixed ^ ids[i] ^ mixed >> 32) * 0x9E3779B97F4A7C15u;
    return mixed;
}

/* Sets the index of a segment's prompt: the index of an equal earlier prompt, or a new index. */
static int place_prompt(Group *group, Segment *segment) {
    if (segment > group->segments && segment[-1].prompt_array == segment->prompt_array) {
        segment->prompt_index = segment[-1].prompt_index;
        return 1;
    }
    segment->prompt_index = index_of(group->prompt_at, hash(&segment->prompt), group->prompt_count);
    if (segment->prompt_index < 0) return -1;
    if (segment->prompt_index < group->prompt_count) {
        const Py_buffer *other = &group->segments[group->prompts[segment->prompt_index]].prompt;
        return other->len == segment->prompt.len &&
               !memcmp(other->buf, segment->prompt.buf, (size_t)segment->prompt.len); /* else a hash collision */
    }
    if (!are_ids(&segment->prompt)) return 0;
    Py_ssize_t *grown = PyMem_Realloc(group->prompts, (group->prompt_count + 1) * sizeof(Py_ssize_t));
    if (!grown) {
        PyErr_NoMemory();
        return -1;
    }
    group->prompts = grown;
    grown[group->prompt_count] = segment - group->segments;
    group->prompt_count++;
    group->prompt_tokens += segment->prompt.len / 4;
    return 1;
}

static Segment *new_segment(Group *group) {
    if (group->segment_count == group->segment_room) {
        Py_ssize_t room = group->segment_room ? group->segment_room * 2 : group->count;
        Segment *grown = PyMem_Realloc(group->segments, room * sizeof(Segment));
        if (!grown) {
            PyErr_NoMemory();
            return NULL;
        }
        group->segments = grown;
        group->segment_room = room;
    }
    Segment *segment = &group->segments[group->segment_count++];
    memset(segment, 0, sizeof *segment);
    return segment;
}

static int is_attribute(PyObject *owner, PyObject *name, PyObject *wanted) {
    PyObject *value = PyObject_GetAttr(owner, name);
    if (!value) return -1;
    Py_DECREF(value);
    return value == wanted;
}

/* 1 if the attribute is a dict; *size is then its number of entries. */
static int dict_attribute(PyObject *owner, PyObject *name, Py_ssize_t *size) {
    PyObject *value = PyObject_GetAttr(owner, name);
    if (!value) return -1;
    int is_dict = PyDict_CheckExact(value);
    if (is_dict) *size = PyDict_GET_SIZE(value);
    Py_DECREF(value);
    return is_dict;
}

static int read_segment(Group *group, Py_ssize_t sample, PyObject *given, Py_ssize_t *tokens, Py_ssize_t *length) {
    if (Py_TYPE(given) != segment_type) return 0;
    Py_ssize_t arrays = 0;
    int plain = dict_attribute(given, name_arrays, &arrays);
    if (plain <= 0 || arrays) return plain < 0 ? -1 : 0;
    if ((plain = is_attribute(given, name_loss_mask, Py_None)) <= 0) return plain;
    Segment *segment = new_segment(group);
    if (!segment) return -1;
    if (!(segment->prompt_array = PyObject_GetAttr(given, name_prompt_ids)) ||
        !(segment->response_array = PyObject_GetAttr(given, name_response_ids)) ||
        !(segment->logprobs_array = PyObject_GetAttr(given, name_logprobs)))
        return -1;
    if (!read_vector(segment->prompt_array, 'i', &segment->prompt)) return 0;
    segment->held = 1;
    if (!read_vector(segment->response_array, 'i', &segment->response)) return 0;
    segment->held = 2;
    if (!read_vector(segment->logprobs_array, 'f', &segment->logprobs)) return 0;
    segment->held = 3;
    *tokens = segment->response.len / 4;
    *length = *tokens + segment->prompt.len / 4;
    if (segment->logprobs.len / 4 != *tokens || (*tokens && !segment->prompt.len)) return 0;
    if (!are_ids(&segment->response) || !are_logprobs(&segment->logprobs)) return 0;
    if ((plain = place_prompt(group, segment)) <= 0) return plain;
    Text *rows = &group->rows;
    if (text_literal(rows, group->segment_count > 1 ? ",[" : "[") < 0 || text_number(rows, sample) < 0 ||
        text_literal(rows, ",") < 0 || text_number(rows, segment->prompt_index) < 0 || text_literal(rows, ",") < 0 ||
        text_number(rows, *tokens) < 0 || text_literal(rows, ",false,") < 0)
        return -1;
    PyObject *versions = PyObject_GetAttr(given, name_versions);
    if (!versions) return -1;
    plain = read_versions(group, sample, versions, *tokens);
    Py_DECREF(versions);
    if (plain > 0 && text_literal(rows, "]") < 0) return -1;
    group->tokens += *tokens;
    return plain;
}

/* Reads a sample's segments, and counts its response tokens in *tokens. Appends its sequence lengths: a number, or a
 * list. */
static int read_segments(Group *group, Py_ssize_t sample, PyObject *segments, Py_ssize_t *tokens) {
    if (!PyTuple_CheckExact(segments)) return 0;
    Py_ssize_t count = PyTuple_GET_SIZE(segments), sequences = 0;
    Text *lengths = &group->lengths;
    if (count > 1 && text_literal(lengths, "[") < 0) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t of_segment = 0, length = 0;
        int plain = read_segment(group, sample, PyTuple_GET_ITEM(segments, i), &of_segment, &length);
        if (plain <= 0) return plain;
        if (!length) return 0; /* no sequence */
        *tokens += of_segment;
        if ((sequences++ && text_literal(lengths, ",") < 0) || text_number(lengths, length) < 0) return -1;
    }
    return count > 1 && text_literal(lengths, "]") < 0 ? -1 : 1;
}

static int add_float(PyObject *list, Py_ssize_t at, double value) {
    PyObject *number = PyFloat_FromDouble(value);
    if (!number) return -1;
    PyList_SET_ITEM(list, at, number);
    return 0;
}

static int read_reward(Group *group, Py_ssize_t at, PyObject *sample) {
    PyObject *reward = PyObject_GetAttr(sample, name_reward);
    if (!reward) return -1;
    if (!is_number(reward)) {
        Py_DECREF(reward);
        return 0;
    }
    PyList_SET_ITEM(group->rewards, at, reward);
    PyObject *parts = PyObject_GetAttr(sample, name_reward_parts), *name, *part;
    if (!parts) return -1;
    int plain = PyDict_CheckExact(parts);
    Py_ssize_t position = 0;
    while (plain && PyDict_Next(parts, &position, &name, &part)) {
        plain = is_number(part);
        group->has_numbers = 1;
    }
    Py_DECREF(parts);
    return plain;
}

static int read_temperature(Group *group, Py_ssize_t at, PyObject *sample) {
    PyObject *sampling = PyObject_GetAttr(sample, name_sampling);
    if (!sampling) return -1;
    double number = 1.0;
    int plain = PyDict_CheckExact(sampling);
    if (plain) {
        PyObject *temperature = PyDict_GetItemWithError(sampling, name_temperature); /* borrowed */
        if (!temperature && PyErr_Occurred()) plain = -1;
        if (temperature && temperature != Py_None) {
            plain = PyFloat_CheckExact(temperature);
            if (plain) number = PyFloat_AS_DOUBLE(temperature);
            if (plain && !isfinite(number)) plain = 0;
        }
    }
    Py_DECREF(sampling);
    if (plain > 0 && add_float(group->temperatures, at, number) < 0) return -1;
    return plain;
}

static int read_reason(Group *group, Py_ssize_t at, PyObject *sample) {
    PyObject *reason = PyObject_GetAttr(sample, name_finish_reason);
    if (!reason) return -1;
    Py_DECREF(reason); /* only its address is used */
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(finish_reasons); i += 2) {
        if (PyTuple_GET_ITEM(finish_reasons, i) != reason) continue;
        PyObject *text = PyTuple_GET_ITEM(finish_reasons, i + 1);
        if (at && text_literal(&group->reasons, ",") < 0) return -1;
        return text_add(&group->reasons, PyBytes_AS_STRING(text), (size_t)PyBytes_GET_SIZE(text)) < 0 ? -1 : 1;
    }
    return 0;
}

static int read_sample(Group *group, Py_ssize_t at, PyObject *sample) {
    if (Py_TYPE(sample) != sample_type) return 0;
    int plain;
    if ((plain = is_attribute(sample, name_status, completed)) <= 0) return plain;
    if ((plain = is_attribute(sample, name_error, Py_None)) <= 0) return plain;
    if ((plain = is_attribute(sample, name_failure, Py_None)) <= 0) return plain;
    Py_ssize_t extras = 0;
    if ((plain = dict_attribute(sample, name_extra, &extras)) <= 0) return plain;
    if (extras) group->has_numbers = 1;
    if ((plain = read_reward(group, at, sample)) <= 0) return plain;
    if ((plain = read_temperature(group, at, sample)) <= 0) return plain;
    if ((plain = read_reason(group, at, sample)) <= 0) return plain;
    PyObject *segments = PyObject_GetAttr(sample, name_segments);
    if (!segments) return -1;
    Py_ssize_t tokens = 0;
    if (at && text_literal(&group->lengths, ",") < 0) plain = -1;
    else plain = read_segments(group, at, segments, &tokens);
    Py_DECREF(segments);
    if (plain <= 0 || !tokens) return plain < 0 ? -1 : 0;
    PyObject *number = PyLong_FromSsize_t(tokens);
    if (!number) return -1;
    PyList_SET_ITEM(group->tokens_by_sample, at, number);
    return 1;
}

/* ---- the result ---- */

/* The segments' vectors, in order, joined if they are short, as in_blocks does it. `which` is 0 for prompts, 1 for
 * responses, 2 for logprobs. */
static PyObject *blocks(Group *group, const Py_ssize_t *chosen, Py_ssize_t count, Py_ssize_t tokens, int which) {
    int joined = tokens < short_entries * count;
    PyObject *list = PyList_New(joined ? 1 : count);
    if (!list) return NULL;
    PyObject *bytes = NULL;
    char *end = NULL;
    if (joined) {
        if (!(bytes = PyBytes_FromStringAndSize(NULL, tokens * 4))) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SET_ITEM(list, 0, bytes);
        end = PyBytes_AS_STRING(bytes);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Segment *segment = &group->segments[chosen ? chosen[i] : i];
        Py_buffer *buffer = which == 0 ? &segment->prompt : which == 1 ? &segment->response : &segment->logprobs;
        if (joined) {
            memcpy(end, buffer->buf, (size_t)buffer->len);
            end += buffer->len;
        } else {
            PyObject *array = which == 0   ? segment->prompt_array
                              : which == 1 ? segment->response_array
                                           : segment->logprobs_array;
            PyList_SET_ITEM(list, i, Py_NewRef(array));
        }
    }
    return list;
}

static PyObject *prompt_lengths(Group *group) {
    PyObject *list = PyList_New(group->prompt_count);
    for (Py_ssize_t i = 0; list && i < group->prompt_count; i++) {
        PyObject *number = PyLong_FromSsize_t(group->segments[group->prompts[i]].prompt.len / 4);
        if (!number) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, number);
    }
    return list;
}

/* (epoch, version, tokens of each sample, ...) for all weights. */
static PyObject *loss_tokens(Group *group) {
    PyObject *list = PyList_New(group->weights_count);
    for (Py_ssize_t i = 0; list && i < group->weights_count; i++) {
        Weights *weights = &group->weights[i];
        PyObject *row = PyTuple_New(2 + group->count);
        if (!row) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, row);
        for (Py_ssize_t k = 0; k < 2 + group->count; k++) {
            PyObject *number =
                PyLong_FromSsize_t(k == 0 ? weights->epoch : k == 1 ? weights->version : weights->tokens[k - 2]);
            if (!number) {
                Py_CLEAR(list);
                break;
            }
            PyTuple_SET_ITEM(row, k, number);
        }
    }
    return list;
}

/* The JSON of an empty value whose type is in `kinds`; None for any other value. Borrowed. */
static PyObject *empty_json(PyObject *value, PyObject *kinds) {
    int is_empty = value == Py_None || (PyUnicode_CheckExact(value) && !PyUnicode_GET_LENGTH(value)) ||
                   (PyDict_CheckExact(value) && !PyDict_GET_SIZE(value)) ||
                   (PyTuple_CheckExact(value) && !PyTuple_GET_SIZE(value)) ||
                   (PyList_CheckExact(value) && !PyList_GET_SIZE(value));
    for (Py_ssize_t i = 0; is_empty && i < PyTuple_GET_SIZE(kinds); i += 2)
        if (PyTuple_GET_ITEM(kinds, i) == (PyObject *)Py_TYPE(value)) return PyTuple_GET_ITEM(kinds, i + 1);
    return Py_None;
}

/* For each detail, the JSON of its value if all samples have an empty value of one type, else None. */
static PyObject *empty_details(PyObject *samples) {
    PyObject *list = PyList_New(PyTuple_GET_SIZE(details));
    for (Py_ssize_t i = 0; list && i < PyTuple_GET_SIZE(details); i++) {
        PyObject *name = PyTuple_GET_ITEM(PyTuple_GET_ITEM(details, i), 0);
        PyObject *kinds = PyTuple_GET_ITEM(PyTuple_GET_ITEM(details, i), 1), *text = NULL;
        PyTypeObject *type = NULL;
        for (Py_ssize_t k = 0; text != Py_None && k < PyTuple_GET_SIZE(samples); k++) {
            PyObject *value = PyObject_GetAttr(PyTuple_GET_ITEM(samples, k), name);
            if (!value) {
                Py_DECREF(list);
                return NULL;
            }
            text = !type || type == Py_TYPE(value) ? empty_json(value, kinds) : Py_None;
            type = Py_TYPE(value);
            Py_DECREF(value);
        }
        PyList_SET_ITEM(list, i, Py_NewRef(text ? text : Py_None));
    }
    return list;
}

static PyObject *answer(Group *group, PyObject *samples) {
    return Py_BuildValue(
        "(OOONNy#y#y#NONNNnn)", group->rewards, group->temperatures, group->tokens_by_sample, prompt_lengths(group),
        loss_tokens(group), group->rows.at, (Py_ssize_t)group->rows.size, group->lengths.at,
        (Py_ssize_t)group->lengths.size, group->reasons.at, (Py_ssize_t)group->reasons.size,
        empty_details(samples), group->has_numbers ? Py_True : Py_False,
        blocks(group, group->prompts, group->prompt_count, group->prompt_tokens, 0),
        blocks(group, NULL, group->segment_count, group->tokens, 1),
        blocks(group, NULL, group->segment_count, group->tokens, 2), group->prompt_tokens, group->tokens);
}

static PyObject *scan(PyObject *Py_UNUSED(module), PyObject *samples) {
    if (!sample_type || !PyTuple_CheckExact(samples)) Py_RETURN_NONE; /* a dict key's code could change a list */
    Group group = {.count = PyTuple_GET_SIZE(samples)};
    if (!group.count) Py_RETURN_NONE;
    PyObject *result = NULL;
    int plain = 1;
    group.rewards = PyList_New(group.count);
    group.temperatures = PyList_New(group.count);
    group.tokens_by_sample = PyList_New(group.count);
    group.prompt_at = PyDict_New();
    group.weights_at = PyDict_New();
    if (!group.rewards || !group.temperatures || !group.tokens_by_sample || !group.prompt_at || !group.weights_at)
        plain = -1;
    for (Py_ssize_t i = 0; plain > 0 && i < group.count; i++)
        plain = read_sample(&group, i, PyTuple_GET_ITEM(samples, i));
    if (plain > 0) result = answer(&group, samples);
    else if (!plain) result = Py_NewRef(Py_None);
    release(&group);
    return result;
}

/* ---- decoding ---- */

/* array[begin:end] */
static PyObject *slice(PyObject *array, Py_ssize_t begin, Py_ssize_t end) {
    PyObject *first = PyLong_FromSsize_t(begin), *last = PyLong_FromSsize_t(end), *view = NULL, *range = NULL;
    if (first && last && (range = PySlice_New(first, last, NULL))) view = PyObject_GetItem(array, range);
    Py_XDECREF(first);
    Py_XDECREF(last);
    Py_XDECREF(range);
    return view;
}

/* The version spans of a segment; NULL without an exception for spans that are not plain. */
static PyObject *make_spans(PyObject *rows, Py_ssize_t tokens) {
    if (!PyList_CheckExact(rows)) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(rows), covered = 0;
    PyObject *spans = PyTuple_New(count);
    for (Py_ssize_t i = 0; spans && i < count; i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        Py_ssize_t numbers[3] = {0};
        int plain = PyList_CheckExact(row) && PyList_GET_SIZE(row) == 3;
        for (int k = 0; plain && k < 3; k++)
            plain = whole_number(PyList_GET_ITEM(row, k), 0, k < 2 ? MOST_VERSIONS : tokens - covered, &numbers[k]);
        PyObject *arguments = plain ? PyTuple_Pack(1, row) : NULL;
        PyObject *span = arguments ? PyTuple_Type.tp_new(span_type, arguments, NULL) : NULL;
        Py_XDECREF(arguments);
        if (!span) {
            Py_DECREF(spans);
            return NULL;
        }
        PyTuple_SET_ITEM(spans, i, span);
        covered += numbers[2];
    }
    if (spans && covered != tokens) Py_CLEAR(spans);
    return spans;
}

static int set_new(PyObject *segment, PyObject *name, PyObject *value) {
    int failed = !value || PyObject_GenericSetAttr(segment, name, value) < 0;
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

/* A segment of the response ids from `start` on; NULL without an exception for a row that is not plain. */
static PyObject *make_segment(PyObject *row, PyObject *prompt, PyObject *ids, PyObject *logprobs, Py_ssize_t start,
                              Py_ssize_t tokens) {
    PyObject *spans = make_spans(PyList_GET_ITEM(row, 4), tokens);
    if (!spans) return NULL;
    PyObject *segment = segment_type->tp_alloc(segment_type, 0);
    if (!segment) {
        Py_DECREF(spans);
        return NULL;
    }
    if (set_new(segment, name_versions, spans) < 0 || set_new(segment, name_prompt_ids, Py_NewRef(prompt)) < 0 ||
        set_new(segment, name_response_ids, slice(ids, start, start + tokens)) < 0 ||
        set_new(segment, name_logprobs, slice(logprobs, start, start + tokens)) < 0 ||
        set_new(segment, name_loss_mask, Py_NewRef(Py_None)) < 0 || set_new(segment, name_arrays, PyDict_New()) < 0)
        Py_CLEAR(segment);
    return segment;
}

static int add_segments(PyObject *by_sample, PyObject *rows, PyObject *prompts, PyObject *ids, PyObject *logprobs) {
    Py_ssize_t total = PyObject_Length(ids), start = 0;
    if (total < 0) return -1;
    if (PyObject_Length(logprobs) != total) return PyErr_Occurred() ? -1 : 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        Py_ssize_t sample, prompt, tokens;
        if (!PyList_CheckExact(row) || PyList_GET_SIZE(row) != 5 || PyList_GET_ITEM(row, 3) != Py_False ||
            !whole_number(PyList_GET_ITEM(row, 0), 0, PyList_GET_SIZE(by_sample) - 1, &sample) ||
            !whole_number(PyList_GET_ITEM(row, 1), 0, PyList_GET_SIZE(prompts) - 1, &prompt) ||
            !whole_number(PyList_GET_ITEM(row, 2), 0, total - start, &tokens))
            return 0;
        PyObject *segment = make_segment(row, PyList_GET_ITEM(prompts, prompt), ids, logprobs, start, tokens);
        if (!segment) return PyErr_Occurred() ? -1 : 0;
        int failed = PyList_Append(PyList_GET_ITEM(by_sample, sample), segment);
        Py_DECREF(segment);
        if (failed) return -1;
        start += tokens;
    }
    return start == total;
}

static PyObject *segments(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *rows, *prompts, *ids, *logprobs, *result = NULL;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "nOO!OO", &count, &rows, &PyList_Type, &prompts, &ids, &logprobs)) return NULL;
    if (!sample_type || count < 0 || !PyList_CheckExact(rows)) Py_RETURN_NONE;
    PyObject *by_sample = PyList_New(count);
    int plain = by_sample ? 1 : -1;
    for (Py_ssize_t i = 0; plain > 0 && i < count; i++) {
        PyObject *list = PyList_New(0);
        if (list) PyList_SET_ITEM(by_sample, i, list);
        else plain = -1;
    }
    if (plain > 0) plain = add_segments(by_sample, rows, prompts, ids, logprobs);
    if (plain > 0 && (result = PyTuple_New(count))) {
        for (Py_ssize_t i = 0; result && i < count; i++) {
            PyObject *of_sample = PyList_AsTuple(PyList_GET_ITEM(by_sample, i));
            if (of_sample) PyTuple_SET_ITEM(result, i, of_sample);
            else Py_CLEAR(result);
        }
    } else if (!plain)
        result = Py_NewRef(Py_None);
    Py_XDECREF(by_sample);
    return result;
}

static PyObject *use(PyObject *Py_UNUSED(module), PyObject *args) {
    PyTypeObject *types[4];
    PyObject *status, *reasons, *fields;
    float tolerance;
    Py_ssize_t entries;
    if (!PyArg_ParseTuple(args, "O!O!O!O!OO!O!fn", &PyType_Type, &types[0], &PyType_Type, &types[1], &PyType_Type,
                          &types[2], &PyType_Type, &types[3], &status, &PyTuple_Type, &reasons, &PyTuple_Type, &fields,
                          &tolerance, &entries))
        return NULL;
    if (sample_type) {
        PyErr_SetString(PyExc_RuntimeError, "use was called before");
        return NULL;
    }
    sample_type = (PyTypeObject *)Py_NewRef((PyObject *)types[0]);
    segment_type = (PyTypeObject *)Py_NewRef((PyObject *)types[1]);
    span_type = (PyTypeObject *)Py_NewRef((PyObject *)types[2]);
    array_type = (PyTypeObject *)Py_NewRef((PyObject *)types[3]);
    completed = Py_NewRef(status);
    finish_reasons = Py_NewRef(reasons);
    details = Py_NewRef(fields);
    logprob_tolerance = tolerance;
    short_entries = entries;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"scan", scan, METH_O, "The content of a plain group; None for any other group. See rollq.buffer.wire.compiled."},
    {"segments", segments, METH_VARARGS, "The segments of each sample in a plain frame; None for any other frame."},
    {"use", use, METH_VARARGS, "Set the types that samples are compared with. Only once."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_plain", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__plain(void) {
#define INTERN(name)                                                                                                   \
    if (!(name_##name = PyUnicode_InternFromString(#name))) return NULL;
    NAMES(INTERN)
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddIntConstant(module, "SOURCE", SOURCE) < 0) Py_CLEAR(module);
    return module;
}
