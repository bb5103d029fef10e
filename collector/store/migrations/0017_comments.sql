-- A comment on each table and column, which docs/sql.md shows. Columns of a step that SQL lacked:
-- its duration, and a loss that is NULL if it is unknown (before, NaN, which made each mean NaN).
ALTER TABLE steps ADD COLUMN IF NOT EXISTS duration_ns Int64 ALIAS end_ns - start_ns;
ALTER TABLE steps MODIFY COLUMN loss Nullable(Float64);
ALTER TABLE steps UPDATE loss = NULL WHERE isNaN(loss);

ALTER TABLE runs
    MODIFY COMMENT 'One row for each run and epoch; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN created_ns 'Time at which the row was first stored, Unix ns',
    COMMENT COLUMN started_ns 'Start of the first process, Unix ns; NULL: unknown',
    COMMENT COLUMN ended_ns 'End of the last process, Unix ns; NULL: it runs, or its end is unknown',
    COMMENT COLUMN state 'running, ended, failed or lost',
    COMMENT COLUMN source_format 'rankscope, or the format of an imported trace',
    COMMENT COLUMN world_size 'Number of ranks of the job, traced or not',
    COMMENT COLUMN layout 'Sizes of the parallel axes: dp, pp, tp, cp, ep; empty: unknown',
    COMMENT COLUMN model 'JSON of the model: name, num_parameters, flops_per_token; empty: unknown',
    COMMENT COLUMN flops_per_token 'FLOPs of training on one token, as declared or derived; NULL: unknown, and so is MFU',
    COMMENT COLUMN flops_convention 'What is counted in flops_per_token',
    COMMENT COLUMN paced 'JSON of the set times of a paced run; empty: not paced',
    COMMENT COLUMN manifest 'JSON of what the first rank reported: versions, settings, layout',
    COMMENT COLUMN revision 'Version of the row: the highest replaces the others of its key';

ALTER TABLE ranks
    MODIFY COMMENT 'One row for each process of a rank; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN rank 'Global rank',
    COMMENT COLUMN process 'Id of the process, new with each start',
    COMMENT COLUMN host 'Host name',
    COMMENT COLUMN boot_id 'Boot of the host: its monotonic clock starts again with each',
    COMMENT COLUMN local_rank 'Rank within its host',
    COMMENT COLUMN pod 'Kubernetes pod; empty: none or unknown',
    COMMENT COLUMN device_uuid 'UUID of the device; empty: unknown',
    COMMENT COLUMN device_name 'Name of the device, such as NVIDIA H100 80GB HBM3; empty: unknown',
    COMMENT COLUMN dtype 'Number type of the matrix products; empty: unknown',
    COMMENT COLUMN peak_flops_per_s 'Declared peak of the device, FLOP/s; NULL: taken from the table of devices',
    COMMENT COLUMN dp 'Data-parallel position; -1: unknown',
    COMMENT COLUMN tp 'Tensor-parallel position; -1: unknown',
    COMMENT COLUMN pp 'Pipeline stage; -1: unknown',
    COMMENT COLUMN cp 'Context-parallel position; -1: unknown',
    COMMENT COLUMN ep 'Expert-parallel position; -1: unknown',
    COMMENT COLUMN switch 'Network switch of the host, from --topology; empty: unknown',
    COMMENT COLUMN rack 'Rack of the host, from --topology; empty: unknown',
    COMMENT COLUMN rail 'Network rail of the device, from --topology; empty: unknown',
    COMMENT COLUMN pid 'Process id on its host',
    COMMENT COLUMN manifest_hash 'Key of the rank''s row in manifests',
    COMMENT COLUMN started_ns 'Start of the process, Unix ns; NULL: unknown',
    COMMENT COLUMN exit_state 'ended, failed or lost; empty: the process runs',
    COMMENT COLUMN exit_ns 'End of the process, Unix ns; NULL: it runs, or its end is unknown',
    COMMENT COLUMN dropped 'Number of lost records by reason; docs/operations.md explains the reasons',
    COMMENT COLUMN revision 'Version of the row: the highest replaces the others of its key',
    COMMENT COLUMN produced 'Number of records that the process has made so far, by its own count; NULL: unknown';

ALTER TABLE groups
    MODIFY COMMENT 'One row for each communication group of an epoch; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN group_id 'Hash of the group''s name and members, equal on all of them',
    COMMENT COLUMN kind 'Kind of its communication: dp-comm, tp-comm, ... or other',
    COMMENT COLUMN name 'Name of the group in the job',
    COMMENT COLUMN members 'Global ranks of the group';

ALTER TABLE spans
    MODIFY COMMENT 'One row for each piece of work on one track of one rank; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN step 'Optimizer step; -1: outside any step',
    COMMENT COLUMN rank 'Global rank',
    COMMENT COLUMN start_ns 'Begin, Unix ns, aligned between hosts',
    COMMENT COLUMN kind 'forward, backward, optimizer, tp-comm, cp-comm, ep-comm, dp-comm, pp-send, pp-recv, wait, host, data, gc, checkpoint or other',
    COMMENT COLUMN name 'Name of the operation, such as all_reduce',
    COMMENT COLUMN track 'Lane of the timeline: a CUDA stream or a thread of the rank',
    COMMENT COLUMN group_id 'Group of a communication, or of the one that a wait waits for; 0: none',
    COMMENT COLUMN seq 'Number of the communication in its group, equal on all members; for p2p in its pair of ranks; -1: none',
    COMMENT COLUMN src_rank 'Sending rank of a transfer, global; -1: none',
    COMMENT COLUMN dst_rank 'Receiving rank of a transfer, global; -1: none',
    COMMENT COLUMN microbatch 'Micro-batch of the step; -1: none',
    COMMENT COLUMN chunk 'Model part on the pipeline stage; -1: none',
    COMMENT COLUMN duration_ns 'Duration in ns; of a communication, the wait for the other members is in it',
    COMMENT COLUMN launch_ns 'Time at which the host issued the work, Unix ns; -1: unknown',
    COMMENT COLUMN num_bytes 'Bytes of a communication on this rank: the larger of what is sent and what is received; -1: unknown',
    COMMENT COLUMN interval_id 'Equal for the operations that one call issued together; 0: alone',
    COMMENT COLUMN parent_row 'Row of the enclosing span in the same segment; NULL: none',
    COMMENT COLUMN flags 'Bits: 1 async, 2 coalesced, 4 begin and 8 end measured on the device, 16 host clock, 32 open, 64 error, 128 end is an upper bound',
    COMMENT COLUMN depth 'Nesting below the outermost span of the track, which has 0',
    COMMENT COLUMN segment 'File of the spool that the row was in; with row, the identity of a row',
    COMMENT COLUMN row 'Number of the record in its segment';

ALTER TABLE steps
    MODIFY COMMENT 'One row for each step of each rank; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN step 'Optimizer step',
    COMMENT COLUMN rank 'Global rank',
    COMMENT COLUMN start_ns 'Begin of the step on this rank, Unix ns',
    COMMENT COLUMN end_ns 'End of the step on this rank, Unix ns',
    COMMENT COLUMN num_tokens 'Tokens of this rank in the step, equal on all ranks of one data-parallel position; -1: unknown',
    COMMENT COLUMN loss 'Loss that this rank reported; NULL: unknown',
    COMMENT COLUMN peak_memory_bytes 'Peak of the device allocator so far, in bytes; -1: unknown',
    COMMENT COLUMN segment 'File of the spool that the row was in; with row, the identity of a row',
    COMMENT COLUMN row 'Number of the record in its segment',
    COMMENT COLUMN left_out 'Kinds that the rank did not record in this step by request: bit k for kind k, in the order in which column kind of spans lists them',
    COMMENT COLUMN duration_ns 'end_ns - start_ns; not part of SELECT *';

ALTER TABLE microbatches
    MODIFY COMMENT 'One row for each micro-batch of each rank; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN step 'Optimizer step',
    COMMENT COLUMN rank 'Global rank',
    COMMENT COLUMN microbatch 'Number of the micro-batch in its step',
    COMMENT COLUMN num_tokens 'Tokens of the micro-batch; -1: unknown',
    COMMENT COLUMN sum_squared_lengths 'Sum of the squared lengths of its sequences, to which attention is proportional; -1: unknown',
    COMMENT COLUMN segment 'File of the spool that the row was in; with row, the identity of a row',
    COMMENT COLUMN row 'Number of the record in its segment';

ALTER TABLE clock
    MODIFY COMMENT 'Alignment of the hosts'' clocks over time',
    COMMENT COLUMN host 'Host name',
    COMMENT COLUMN boot_id 'Boot of the host: its monotonic clock starts again with each',
    COMMENT COLUMN at_ns 'Time, Unix ns',
    COMMENT COLUMN offset_ns 'Unix time of the collector minus the host''s monotonic clock at at_ns, ns',
    COMMENT COLUMN drift_ppb 'Drift of the host''s clock, parts per billion',
    COMMENT COLUMN clock_error_ns 'Bound of the error of offset_ns, ns';

ALTER TABLE events
    MODIFY COMMENT 'What happened once: exits, stalls, stacks, profiles, alerts',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN rank 'Global rank; -1: the whole job',
    COMMENT COLUMN at_ns 'Time, Unix ns',
    COMMENT COLUMN kind 'exit, lost, stalled, stack, profile, compile, alert, alert-resolved, ... or a kind that the job reported',
    COMMENT COLUMN text 'The event in one line',
    COMMENT COLUMN data 'JSON with the details; its keys depend on the kind',
    COMMENT COLUMN process 'Process that reported it; one that begins with rankscope: the server',
    COMMENT COLUMN line 'Number of the event in its process';

ALTER TABLE findings
    MODIFY COMMENT 'Findings of runs that rankscope serve analysed, each once; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN analysed_ns 'Time at which the finding opened, Unix ns',
    COMMENT COLUMN position 'Number of the finding in its run, from 0',
    COMMENT COLUMN cause 'Cause, as docs/findings.md lists them',
    COMMENT COLUMN ranks 'Ranks that it names; empty: the whole job',
    COMMENT COLUMN first_step 'First step that shows it; NULL: no step does',
    COMMENT COLUMN last_step 'Last step that shows it; NULL: no step does',
    COMMENT COLUMN slowdown 'S if only these ranks were as recorded; NULL: unknown',
    COMMENT COLUMN recoverable_ratio 'Share of the lost time that fixing it would save; NULL: unknown',
    COMMENT COLUMN confidence 'Share of such findings that are right on labelled runs, 0 to 1',
    COMMENT COLUMN evidence 'The measurements in one sentence',
    COMMENT COLUMN epoch 'Incarnation of the job; -1: unknown',
    COMMENT COLUMN checked_step 'Last step that was analysed; -1: unknown',
    COMMENT COLUMN updated_ns 'Time of the last change, Unix ns',
    COMMENT COLUMN closed_ns 'Time at which it closed, Unix ns; NULL: it is open, or was open at the end of the run';

ALTER TABLE ledger
    MODIFY COMMENT 'One row for each cut: which rows were sent and stored; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN rank 'Global rank',
    COMMENT COLUMN process 'Id of the process, new with each start',
    COMMENT COLUMN segment 'Number of the spool''s file',
    COMMENT COLUMN first_row 'First row of the cut',
    COMMENT COLUMN end_row 'First row after the cut',
    COMMENT COLUMN sha256 'Hash of the cut''s rows; empty: of a part of a cut',
    COMMENT COLUMN num_spans 'Number of its spans',
    COMMENT COLUMN num_steps 'Number of its step records',
    COMMENT COLUMN num_microbatches 'Number of its micro-batch records',
    COMMENT COLUMN num_torn 'Number of records that the process had not completed',
    COMMENT COLUMN num_bad 'Number of impossible records, see bad_rows',
    COMMENT COLUMN state 'stored; repeated: perhaps stored twice, reads remove duplicates; sent: being written',
    COMMENT COLUMN at_ns 'Time of this state, Unix ns',
    COMMENT COLUMN revision 'Version of the row: the highest replaces the others of its key';

ALTER TABLE bad_rows
    MODIFY COMMENT 'Records that cannot be measurements, kept with their bytes',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN rank 'Global rank',
    COMMENT COLUMN segment 'Number of the spool''s file',
    COMMENT COLUMN row 'Number of the record in its segment',
    COMMENT COLUMN reason 'Why the record is impossible',
    COMMENT COLUMN record 'The record''s bytes in hexadecimal';

ALTER TABLE samples
    MODIFY COMMENT 'Values of hosts and devices, read once a second; docs/samples.md lists the names',
    COMMENT COLUMN run_id 'Empty: the host''s, whatever runs there',
    COMMENT COLUMN host 'Host name',
    COMMENT COLUMN device 'Local rank that uses the device; -1: the host',
    COMMENT COLUMN at_ns 'Time, Unix ns',
    COMMENT COLUMN name 'Quantity with its unit, such as gpu-clock-hz',
    COMMENT COLUMN value 'Value in that unit; counters grow';

ALTER TABLE manifests
    MODIFY COMMENT 'Settings of ranks: equal ones are one row, see ranks.manifest_hash',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN manifest_hash 'Hash of the settings',
    COMMENT COLUMN settings 'Settings by name: environment, versions, configuration, device';

ALTER TABLE attempts
    MODIFY COMMENT 'Writers that were about to store a cut; empty in an embedded store',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN rank 'Global rank',
    COMMENT COLUMN segment 'Number of the spool''s file',
    COMMENT COLUMN first_row 'First row of the cut',
    COMMENT COLUMN end_row 'First row after the cut',
    COMMENT COLUMN sha256 'Hash of the cut''s rows; empty: of a part of a cut',
    COMMENT COLUMN writer 'Id of the collector''s process',
    COMMENT COLUMN at_ns 'Time, Unix ns';

ALTER TABLE owners
    MODIFY COMMENT 'Claims of senders to runs; the earliest counts',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN at_ns 'Time, Unix ns',
    COMMENT COLUMN owner 'Holder of the token that wrote first';

ALTER TABLE deletions
    MODIFY COMMENT 'Deleted runs, whose names are not accepted again; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN at_ns 'Time of the request, Unix ns',
    COMMENT COLUMN reason 'Why: a request or expiry',
    COMMENT COLUMN done_ns 'Time at which the last row was removed, Unix ns; NULL: not yet',
    COMMENT COLUMN revision 'Version of the row: the highest replaces the others of its key';

ALTER TABLE expired
    MODIFY COMMENT 'Steps whose spans have expired; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN last_step 'The spans of the steps up to this one are gone',
    COMMENT COLUMN kept_first 'First steps of the ranges that were kept, around findings',
    COMMENT COLUMN kept_last 'Last steps of these ranges',
    COMMENT COLUMN at_ns 'Time, Unix ns';

ALTER TABLE rollups
    MODIFY COMMENT 'Sums of each closed step by rank and kind; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN step 'Optimizer step',
    COMMENT COLUMN rank 'Global rank',
    COMMENT COLUMN kind 'Kind of span, as in spans',
    COMMENT COLUMN num_spans 'Number of spans',
    COMMENT COLUMN num_unsplit 'Spans among them whose wait is unknown',
    COMMENT COLUMN busy_ns 'Time in which at least one span of the kind ran, waits included, ns',
    COMMENT COLUMN wait_ns 'Sum of the waits for the last member to arrive, ns',
    COMMENT COLUMN transfer_ns 'Sum of the transfers after that, ns',
    COMMENT COLUMN exposed_ns 'Communication that no compute of the rank covered, ns',
    COMMENT COLUMN revision 'Number of rows that the sums are made of';

ALTER TABLE closed_steps
    MODIFY COMMENT 'What the rollups and pictures of a step are made of; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN step 'Optimizer step',
    COMMENT COLUMN begin_ns 'First begin of the step over all ranks, Unix ns',
    COMMENT COLUMN end_ns 'Last end of the step over all ranks, Unix ns',
    COMMENT COLUMN num_spans 'Number of its spans',
    COMMENT COLUMN num_ranks 'Number of ranks with spans',
    COMMENT COLUMN num_described 'Number of known groups and ranks of the epoch',
    COMMENT COLUMN at_ns 'Time of the computation, Unix ns',
    COMMENT COLUMN revision 'Number of rows that it used',
    COMMENT COLUMN orderings 'For each ordering of the ranks, the one whose picture is kept',
    COMMENT COLUMN line_ranks 'Ranks in one line of the whole step''s picture; 0: none is kept';

ALTER TABLE heartbeats
    MODIFY COMMENT 'Reports of each rank, once a second, for an hour; then the newest of each; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN rank 'Global rank',
    COMMENT COLUMN host 'Host name',
    COMMENT COLUMN pid 'Process id on its host',
    COMMENT COLUMN at_ns 'Time on the collector''s clock, Unix ns',
    COMMENT COLUMN address 'Address of the host',
    COMMENT COLUMN pod 'Kubernetes pod; empty: none or unknown',
    COMMENT COLUMN hardware 'Name of the device; empty: unknown',
    COMMENT COLUMN local_rank 'Rank within its host',
    COMMENT COLUMN state 'starting, training, silent, ended, failed or lost',
    COMMENT COLUMN step 'Newest step of which the rank recorded anything; -1: none',
    COMMENT COLUMN rdma_sent_bytes 'Bytes that the host''s RDMA ports have sent; NULL: unknown',
    COMMENT COLUMN rdma_received_bytes 'Bytes that the host''s RDMA ports have received; NULL: unknown';

ALTER TABLE pictures
    MODIFY COMMENT 'Pictures of steps with many spans, as tiles of pixels; for the timeline page',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN epoch 'Incarnation of the job between restarts, from 0; steps may repeat in a new one',
    COMMENT COLUMN step 'Optimizer step',
    COMMENT COLUMN ordering 'Order of the ranks from the top',
    COMMENT COLUMN line_ranks 'Ranks in one line',
    COMMENT COLUMN zoom 'The step is cut into 4^zoom tiles',
    COMMENT COLUMN depth '0: the whole step; 1: finer, expires with the spans',
    COMMENT COLUMN tile 'Number of the tile in time',
    COMMENT COLUMN first_line 'First line of the row',
    COMMENT COLUMN num_lines 'Number of lines of the row',
    COMMENT COLUMN ranks 'Ranks from the top',
    COMMENT COLUMN compute_kind 'Kind of compute of each pixel, as a code',
    COMMENT COLUMN compute_fill 'Covered share of each pixel in 1/8',
    COMMENT COLUMN comm_kind 'Kind of communication of each pixel, as a code',
    COMMENT COLUMN comm_fill 'Covered share of each pixel in 1/8',
    COMMENT COLUMN revision 'That of the row in closed_steps; others are stale';

ALTER TABLE placements
    MODIFY COMMENT 'Run and epoch under which each process is stored',
    COMMENT COLUMN declared_run 'Name that the process declares',
    COMMENT COLUMN declared_epoch 'Epoch that the process declares',
    COMMENT COLUMN stored_run 'Name under which it is stored',
    COMMENT COLUMN stored_epoch 'Epoch under which it is stored',
    COMMENT COLUMN rank 'Global rank',
    COMMENT COLUMN process 'Id of the process, new with each start',
    COMMENT COLUMN job 'Key of the launch, equal for its processes; empty: unknown',
    COMMENT COLUMN world_size 'Number of ranks of its job',
    COMMENT COLUMN layout 'Layout that it declares, as text; empty: unknown',
    COMMENT COLUMN started_ns 'Start of the process, Unix ns',
    COMMENT COLUMN at_ns 'Time of the decision, Unix ns',
    COMMENT COLUMN note 'Why the name or the epoch differs; empty: they do not';

ALTER TABLE reports
    MODIFY COMMENT 'The report of each run that has ended, made once; read it with FINAL',
    COMMENT COLUMN run_id 'Name of the run',
    COMMENT COLUMN version 'Version of rankscope that made it',
    COMMENT COLUMN num_spans 'Number of spans of which it was made',
    COMMENT COLUMN num_steps 'Number of steps of which it was made',
    COMMENT COLUMN num_rows 'Number of rows of which it was made',
    COMMENT COLUMN state 'State of the run at that time: ended, failed or lost',
    COMMENT COLUMN at_ns 'Time at which it was made, Unix ns',
    COMMENT COLUMN cause 'Cause of the verdict',
    COMMENT COLUMN severity 'Severity of the verdict: critical, warning, minor or none; empty: unknown',
    COMMENT COLUMN ranks 'Ranks that the verdict names',
    COMMENT COLUMN verdict 'The verdict in one sentence',
    COMMENT COLUMN step_s 'Mean step time, s; NULL: unknown',
    COMMENT COLUMN mfu 'Mean MFU, 0 to 1; NULL: unknown',
    COMMENT COLUMN loss 'Last loss; NULL: unknown',
    COMMENT COLUMN duration_ns 'From the first begin to the last end of its steps, ns; NULL: unknown',
    COMMENT COLUMN num_dropped 'Number of lost records',
    COMMENT COLUMN body 'The whole report as JSON; empty: it was too long';

ALTER TABLE schema_version
    MODIFY COMMENT 'Migrations that were applied',
    COMMENT COLUMN version 'Number of the migration',
    COMMENT COLUMN name 'File of the migration',
    COMMENT COLUMN applied_at 'Time, of the store''s host';
