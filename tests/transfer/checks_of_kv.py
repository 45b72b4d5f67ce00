"""What is checked of bytes, blocks and names, whoever has them."""

from kvrelay.blocks import BlockManager
from kvrelay.encoding import decode
from kvrelay.messages import (
    Ledger,
)
from kvrelay.prefixes import Prefixes, block_hash, root_hash
from kvrelay.transfer.ports import Inlet, Outlet
from kvrelay.transfer.protocol.piece import (
    _check_size,
    check_piece,
    digest,
    is_intact,
    is_intact_on_device,
    split,
    unpack,
)
from tests import test_blocks as blocks
from tests import test_messages as messages
from tests import test_prefixes as prefixes
from tests.model import test_staging as staging
from tests.transfer import test_piece as piece
from tests.transfer import test_ports as ports
from tests.transfer.cut import cut

CHECKS_OF_KV = [
    *cut(
        decode,
        ("seal(text) != frame", messages.test_a_message_that_was_changed_into_another_one_is_refused),
    ),
    *cut(
        is_intact,
        ("digest(header, *parts) == header.digest", piece.test_every_flipped_bit_of_a_piece_is_noticed, "True"),
        ("header.digest_kind is DigestKind.CONTENT and ", piece.test_a_digest_is_taken_for_no_other_kind),
    ),
    *cut(
        is_intact_on_device,
        (
            "digest(header, device_digest) == header.digest",
            piece.test_every_flipped_bit_of_a_piece_on_a_device_is_noticed,
            "True",
        ),
        ("header.digest_kind is DigestKind.DEVICE_DIGEST and ", piece.test_a_digest_is_taken_for_no_other_kind),
        (
            " and num_bytes == header.payload_bytes",
            piece.test_every_flipped_bit_of_a_piece_on_a_device_is_noticed,
        ),
    ),
    *cut(
        digest,
        ("_pack_fields(header)", piece.test_every_flipped_bit_of_a_piece_is_noticed, "b''"),
    ),
    *cut(
        unpack,
        ("size != HEADER_BYTES", piece.test_wrong_magic_version_dtype_and_length_are_named),
        ("magic != MAGIC or ", piece.test_wrong_magic_version_dtype_and_length_are_named),
        (" or version != VERSION", piece.test_wrong_magic_version_dtype_and_length_are_named),
        ("dtype not in _DTYPES", piece.test_wrong_magic_version_dtype_and_length_are_named),
        ("kind not in _DIGEST_KINDS", piece.test_wrong_magic_version_dtype_and_length_are_named),
        ("_check_size(header)", piece.test_a_payload_size_that_does_not_follow_from_the_layout_is_a_wire_error, "pass"),
    ),
    *cut(
        _check_size,
        ("not rows or ", piece.test_a_payload_size_that_does_not_follow_from_the_layout_is_a_wire_error),
        (
            "size % rows or ",
            piece.test_a_payload_size_that_does_not_follow_from_the_layout_is_a_wire_error,
        ),
        (
            "not 0 < size // rows < _MAX_ROW_BYTES",
            piece.test_a_payload_size_that_does_not_follow_from_the_layout_is_a_wire_error,
        ),
    ),
    *cut(
        split,
        ("not frame or ", piece.test_headers_that_lie_behind_each_other_are_told_apart_if_they_are_whole),
        (
            " or len(frame) % HEADER_BYTES",
            piece.test_headers_that_lie_behind_each_other_are_told_apart_if_they_are_whole,
        ),
    ),
    *cut(
        check_piece,
        ("expected != found", piece.test_a_payload_that_is_not_as_long_as_the_header_says_is_a_wire_error),
    ),
    *cut(
        BlockManager.allocate,
        ("not 0 <= count <= self.num_free", blocks.test_an_impossible_allocation_changes_nothing),
    ),
    *cut(
        BlockManager._check,
        ("wrong or ", blocks.test_giving_back_what_is_not_leased_changes_nothing),
        (" or len(set(block_ids)) != len(block_ids)", blocks.test_giving_back_what_is_not_leased_changes_nothing),
    ),
    *cut(
        BlockManager.release,
        (
            'self._check(block_ids, self._users, "leased")',
            blocks.test_giving_back_what_is_not_leased_changes_nothing,
            "pass",
        ),
        ("if not self._users[block_id]]", blocks.test_in_use_wins_over_cached_and_a_shared_block_counts_once, "]"),
    ),
    *cut(
        BlockManager.revoke,
        (
            'self._check(block_ids, self._users, "leased")',
            blocks.test_giving_back_what_is_not_leased_changes_nothing,
            "pass",
        ),
        ("if shared:", blocks.test_what_others_may_read_is_never_revoked, "if False:"),
    ),
    *cut(
        BlockManager.confirm,
        (
            'self._check(block_ids, self._revoked, "revoked")',
            blocks.test_revoked_blocks_stay_out_of_use_until_the_sender_confirms,
            "pass",
        ),
    ),
    *cut(
        BlockManager.publish,
        (
            'self._check(block_ids, self._users, "leased")',
            blocks.test_a_published_block_keeps_its_name_and_nothing_else_is_published,
            "pass",
        ),
        ("len(block_ids) != len(hashes)", blocks.test_a_published_block_keeps_its_name_and_nothing_else_is_published),
        (
            "self._hash_of.get(block_id, name) != name",
            blocks.test_a_published_block_keeps_its_name_and_nothing_else_is_published,
        ),
        (
            "self._block_of.setdefault(name, block_id) == block_id",
            blocks.test_a_twin_of_a_published_block_stays_its_sequences_own,
            "self._block_of.update({name: block_id}) is None",
        ),
    ),
    *cut(
        BlockManager._evict,
        (
            "del self._block_of[self._hash_of.pop(block_id)]",
            blocks.test_prefix_hits_while_the_block_is_being_evicted,
            "self._hash_of.pop(block_id)",
        ),
    ),
    *cut(
        Ledger.conserved,
        (
            "self.free + self.cached + self.leased + self.revoked == self.total",
            blocks.test_a_ledger_tells_that_a_block_is_lost_or_counted_twice,
            "True",
        ),
    ),
    *cut(
        root_hash,
        (
            " + sha256(cache_salt.encode()).digest()",
            prefixes.test_a_name_covers_every_token_before_it_the_model_and_the_salt,
            "",
        ),
        (
            "sha256(fingerprint.encode()).digest() + ",
            prefixes.test_a_name_covers_every_token_before_it_the_model_and_the_salt,
            "",
        ),
    ),
    *cut(
        block_hash,
        ("parent + ", prefixes.test_a_name_covers_every_token_before_it_the_model_and_the_salt, ""),
    ),
    *cut(
        Prefixes._wanted,
        (
            "(len(sequence.token_ids) - 1)",
            prefixes.test_only_full_blocks_are_published_and_one_token_is_left_to_compute,
            "len(sequence.token_ids)",
        ),
    ),
    *cut(
        Outlet._target,
        (" if piece.one_sided else None", ports.test_nothing_is_written_under_a_lease_that_does_not_allow_it),
        ("target if fits else None", ports.test_blocks_that_the_receiver_does_not_have_are_not_written_to, "target"),
    ),
    *cut(
        Inlet.land,
        ("if intact:", ports.test_a_wrong_digest_is_seen_wherever_the_payload_lies, "if True:"),
        (
            "return is_intact(header, *chain.from_iterable(parts))",
            ports.test_a_wrong_digest_is_seen_wherever_the_payload_lies,
            "return True",
        ),
        ("self._device is not None and ", staging.test_a_piece_on_a_device_is_nothing_to_a_worker_without_one),
    ),
    *cut(
        Inlet._land_on_device,
        (
            "if intact and ",
            staging.test_a_piece_that_stays_on_devices_is_written_once_its_digest_is_right,
            "if ",
        ),
    ),
]
