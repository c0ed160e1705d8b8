"""TPU programs of a few lines, for tests of what is read from them."""

from bert_jax.planning.hlo_cost.hlo import parse_program

ONE = {"data": 1, "fsdp": 1, "tensor": 1}


ENTRY = """HloModule m, is_scheduled=true, num_partitions={partitions}

FileNames
1 "/home/somebody/bert_jax/model/encoder.py"
2 "/usr/lib/python3/site-packages/jax/numpy.py"

FunctionNames
1 "Layer.__call__"
2 "outer.<locals>.sum"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=123 end_line=123 column=4 end_column=4}}
2 {{file_name_id=2 function_name_id=2 line=9 end_line=9 column=4 end_column=4}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=2 parent_frame_id=3}}

%sum (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}}

ENTRY %main (a: f32[16,128]) -> f32[16,128] {{
  %a = f32[16,128]{{1,0:T(8,128)}} parameter(0)
{body}
}}
"""


def entry(*lines: str, partitions: int = 8, **mesh_shape: int):
    body = "\n".join(f"  {line}" for line in lines)
    return parse_program(ENTRY.format(body=body, partitions=partitions), ONE | mesh_shape)


def cycles(number: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{number}"}}}}'
